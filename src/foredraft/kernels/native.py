"""The compiled library's functions, for tensors. Shapes are checked here: the library itself gets only addresses."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from ctypes import POINTER, c_char, c_double, c_int64, c_void_p
from itertools import accumulate, chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from foredraft.engine.token_tree import ROOT, depths_of
from foredraft.kernels.decoder import (
    AttentionShape,
    AttentionSpan,
    CacheSpan,
    Stack,
    StackBatch,
    States,
    attention_struct,
    batch_struct,
    check_features,
    feature_rows,
)
from foredraft.kernels.sources import InMemory, WeightSource, blocks_of
from foredraft.kernels.specs import (
    Adjustments,
    Chains,
    DrawSpec,
    MarkovFactors,
    PackedDrawSpecs,
    VerificationBatch,
    VerificationResult,
    adjustments_struct,
    new_token_probs,
    verification_struct,
)
from foredraft.kernels.structs import (
    AdjustmentBatchStruct,
    AttentionCallStruct,
    BatchStruct,
    MatrixStruct,
    StackStruct,
    TokenProbsStruct,
    VerificationBatchStruct,
)
from foredraft.kernels.weight_memory import WeightMemory
from foredraft.kernels.weights import (
    INT8,
    Layout,
    PackedMatrix,
    QuantizedWeight,
    Weight,
    address,
    fits,
    layout_of,
    packed_scales,
)

_SCORES_OF_A_KEY, _KEY_UNIT = 384, 16
"""Bytes of scratch for each key and thread, and the unit that the number of keys is rounded up to."""

_FIRST_WIDTH = 512
"""The number of ids of a truncated distribution that buffers have room for at first."""

_MATRIX, _STACK, _BATCH, _CALLS, _ADJUSTMENTS, _TOKEN_PROBS, _VERIFICATION_BATCH = (
    POINTER(struct)
    for struct in (
        MatrixStruct,
        StackStruct,
        BatchStruct,
        AttentionCallStruct,
        AdjustmentBatchStruct,
        TokenProbsStruct,
        VerificationBatchStruct,
    )
)
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "start": (c_int64, []),
    "packed_bytes": (c_int64, [_MATRIX]),
    "row_steps": (c_int64, [_MATRIX]),
    "pack": (c_int64, [_MATRIX, c_int64, c_int64, *[c_void_p] * 4]),
    "unpack": (None, [_MATRIX, c_void_p, c_int64, c_void_p]),
    "linear_workspace": (c_int64, [_MATRIX, c_int64]),
    "linear": (None, [_MATRIX, c_void_p, c_void_p, c_int64, c_void_p, c_int64]),
    "attention_workspace": (c_int64, [c_int64]),
    "attention": (None, [_CALLS, c_int64, c_void_p, c_int64, c_int64]),
    "fuse": (None, [_STACK, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "stack_workspace": (c_int64, [_STACK, _BATCH, c_int64]),
    "stack": (None, [_STACK, _BATCH, c_void_p, c_int64]),
    "generate": (
        c_int64,
        [
            *(_STACK, _BATCH, c_void_p, c_int64, c_int64),
            *(c_void_p, _ADJUSTMENTS, c_void_p, c_void_p, _TOKEN_PROBS, c_int64, c_void_p, c_void_p, c_int64),
        ],
    ),
    "grow": (
        None,
        [_STACK, _BATCH, c_void_p, c_void_p, c_int64, c_void_p, _ADJUSTMENTS, *[c_void_p] * 3, c_int64],
    ),
    "choose_chains": (
        c_int64,
        [
            *(_MATRIX, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_int64, c_int64, c_void_p, c_int64),
            *(c_void_p, _ADJUSTMENTS, c_void_p, c_void_p, _TOKEN_PROBS, c_int64, c_void_p, c_void_p, c_int64),
        ],
    ),
    "adjust_rows": (None, [c_void_p, c_int64, _ADJUSTMENTS, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "choose": (None, [c_void_p, *[c_int64] * 3, *[c_void_p] * 4, c_int64]),
    "verify": (None, [c_void_p, c_int64, c_int64, _VERIFICATION_BATCH, c_void_p, c_void_p, c_void_p, c_int64]),
    "token_probs": (c_int64, [c_void_p, *[c_int64] * 3, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
    "softmax": (None, [c_void_p, *[c_int64] * 3, c_double, *[c_void_p] * 3, c_int64]),
    "distill": (None, [c_void_p, *[c_int64] * 3, c_double, *[c_void_p] * 4, c_double, *[c_void_p] * 2, c_int64]),
    "argmax": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64]),
    "top": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64]),
}


class Kernels:
    """The library at `path`. The bits of each row's result depend on that row alone, not on the other rows of its pass. Raises OSError
    if it cannot be loaded, or the system does not allow its instructions."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        if not self._library.start():
            raise OSError("the system does not let this process use AMX")
        self._workspaces = _Workspaces()

    def pack(
        self, weight: Weight | WeightSource, bias: Tensor | None = None, memory: WeightMemory | None = None
    ) -> PackedMatrix:
        """Pack a weight. weight: [out, in], stored in bfloat16 unless it is quantised; read in blocks of rows. bias: [out]. memory: to
        take the memory for the weights from; None: allocate it.

        Scales of groups are stored in float16 if that changes none of them by more than one part in 2048, else in float32.
        Raises ValueError for a quantisation that no kernel multiplies.
        """
        source = InMemory(weight) if isinstance(weight, Tensor | QuantizedWeight) else weight
        matrix = self._packed(source, bias, memory, torch.float16) or self._packed(source, bias, memory, torch.float32)
        assert matrix is not None
        return matrix

    def _packed(
        self, source: WeightSource, bias: Tensor | None, memory: WeightMemory | None, scale_dtype: torch.dtype
    ) -> PackedMatrix | None:
        """The packed matrix; None if the scales do not fit the dtype."""
        matrix = None
        for first, block in blocks_of(source):
            layout = layout_of(block, scale_dtype)
            if isinstance(block, QuantizedWeight) and not fits(block, layout):
                if matrix is not None and memory is not None:
                    memory.give_back(matrix.tensors["weights"])
                return None
            matrix = matrix or self._empty_matrix(source.shape, layout, bias, memory)
            self._pack_rows(matrix, first, block)
        return matrix

    def _empty_matrix(
        self, shape: tuple[int, int], layout: Layout, bias: Tensor | None, memory: WeightMemory | None
    ) -> PackedMatrix:
        n, k = shape
        tensors: dict[str, Tensor] = {}
        if bias is not None:
            tensors["bias"] = bias.detach().float().contiguous()
        if layout.kind == INT8:
            tensors |= {"scales": torch.empty(n), "corrections": torch.zeros(n, dtype=torch.int32)}
        matrix = PackedMatrix(n, k, layout, tensors)
        num_bytes = self._library.packed_bytes(matrix.struct)
        matrix.set_memory(torch.empty(num_bytes, dtype=torch.uint8) if memory is None else memory.take(num_bytes))
        matrix.row_steps = self._library.row_steps(matrix.struct)
        return matrix

    def _pack_rows(self, matrix: PackedMatrix, first: int, block: Weight) -> None:
        scales: Tensor | None = None
        offsets: Tensor | None = None
        corrections: Tensor | None = None
        if not isinstance(block, QuantizedWeight):
            codes = block.detach().to(torch.bfloat16).contiguous()
        else:
            codes = block.codes.contiguous()
            if matrix.layout.kind == INT8:
                matrix.tensors["scales"][first : first + len(codes)] = block.scales[:, 0]
                corrections = matrix.tensors["corrections"][first:]
            else:
                scales, offsets = packed_scales(block, matrix.layout)
        num_bad = self._library.pack(
            matrix.struct,
            first,
            codes.shape[0],
            codes.data_ptr(),
            address(scales),
            address(offsets),
            address(corrections),
        )
        if num_bad:
            raise ValueError(f"{num_bad} codes of a four-bit weight are neither from -8 to 7 nor among its levels")

    def rows(self, matrix: PackedMatrix, ids: Tensor) -> Tensor:
        """Rows of a packed matrix, dequantised, as for an embedding. ids: [...] int64 -> [..., in] float32

        Raises ValueError for an id that is out of range.
        """
        places = ids.flatten().to(torch.int64).contiguous()
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < matrix.out_features:
            raise ValueError(
                f"rows must be from 0 to {matrix.out_features - 1}: got {int(places.min())} to {int(places.max())}"
            )
        out = torch.empty(len(places), matrix.in_features)
        self._library.unpack(matrix.struct, places.data_ptr(), len(places), out.data_ptr())
        return out.view(*ids.shape, matrix.in_features)

    def linear(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """x: [..., in] bfloat16 -> [..., out] bfloat16"""
        if x.shape[-1] != matrix.in_features or x.dtype != torch.bfloat16:
            raise ValueError(f"rows must have {matrix.in_features} bfloat16 values, not {x.shape[-1]} {x.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], matrix.out_features)
        num_rows = x.numel() // matrix.in_features
        workspace = self._room(self._library.linear_workspace(matrix.struct, num_rows))
        self._library.linear(matrix.struct, x.data_ptr(), out.data_ptr(), num_rows, workspace, torch.get_num_threads())
        return out

    def attend(
        self,
        spans: Sequence[AttentionSpan],
        query: Tensor,
        shape: AttentionShape,
        num_rows: int,
    ) -> Tensor:
        """Attention of one layer over several sequences.

        query: [Hq, T, Dk] bfloat16 -> [num_rows, Hq, Dv] bfloat16; rows that belong to no span are zero
        """
        tensors = [query, *(tensor for span in spans for tensor in (span.keys, span.values))]
        if any(tensor.dtype != torch.bfloat16 for tensor in tensors):
            raise ValueError("queries, keys and values must be bfloat16")
        out = query.new_zeros(num_rows, query.shape[0], spans[0].values.shape[2])
        if query.stride(2) != 1:
            query = query.contiguous()
        calls = (AttentionCallStruct * len(spans))(*(attention_struct(span, query, shape, out) for span in spans))
        room = self._library.attention_workspace(max(span.num_keys for span in spans))
        threads = torch.get_num_threads()
        self._library.attention(calls, len(spans), self._room(room * threads), room, threads)
        return out

    def read(
        self,
        stack: Stack,
        batch: StackBatch,
        rotation: tuple[Tensor, Tensor],
        taps: Sequence[int] = (),
        states: States | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass of a decoder. rotation: cos and sin, [tables, positions, rotary_dim / 2] float32. taps: see model.Body.
        states: of a stateful decoder.

        -> logits [len(wanted), V] float32 and the tapped hidden states [R, F] bfloat16; None without taps, or if the spans say where
        they go
        """
        logits = torch.empty(len(batch.wanted), stack.vocab_size)
        features = None
        if taps and batch.spans[0].features is None:
            features = torch.empty(len(batch.ids), len(taps) * stack.hidden_size, dtype=torch.bfloat16)
        struct, _memory = batch_struct(stack, batch, rotation, logits, taps, features, states)
        threads = torch.get_num_threads()
        room = self._room(self._library.stack_workspace(stack.struct, struct, threads))
        self._library.stack(stack.struct, struct, room, threads)
        return logits, features

    def fuse(self, stack: Stack, features: Tensor) -> Tensor:
        """The states that a pass computes from these features. features: [R, F] bfloat16 -> [R, hidden] bfloat16"""
        num_rows = features.shape[0]
        check_features(stack, [features], num_rows)
        rows, states = feature_rows([features]), features.new_empty(num_rows, stack.hidden_size)
        self._library.fuse(
            stack.struct,
            rows.buffer_info()[0],
            num_rows,
            states.data_ptr(),
            self._room(self._library.linear_workspace(stack.struct.features_fc, num_rows)),
            torch.get_num_threads(),
        )
        return states

    def generate(
        self,
        stack: Stack,
        batch: StackBatch,
        rotation: tuple[Tensor, Tensor],
        lens: Sequence[int],
        vocab_size: int,
        specs: Sequence[DrawSpec],
        states: States | None = None,
    ) -> tuple[list[list[int]], Tensor | None, Tensor | None]:
        """Read a batch that wants each span's last row, and generate lens[i] >= 1 tokens after span i, from the first vocab_size ids
        with specs[i], in one call. The last token is not read. Generation for a span stops at a row with a NaN. states: of a
        stateful decoder.

        -> (the tokens, the distributions of all drawn tokens, span after span, [R, W] float32, the ids of their columns
        [R, W]; None if columns are ids). Raises ValueError if slots are not positions.
        """
        if batch.slots is not None:
            raise ValueError("tokens can be generated only after chains: slots must equal positions")
        _check_positions(stack, batch, lens)
        logits = torch.empty(len(batch.wanted), stack.vocab_size)
        struct, _memory = batch_struct(stack, batch, rotation, logits, states=states)
        counts, width = array("q", lens), max(lens)
        generated = array("q", [-1]) * (len(lens) * width)
        threads = torch.get_num_threads()
        # the last pass has the longest context, and one row for each span
        more = _SCORES_OF_A_KEY * (width + _KEY_UNIT) * threads
        room = self._room(self._library.stack_workspace(stack.struct, struct, threads) + more)
        packed = PackedDrawSpecs(specs)
        token_probs, probs, ids, _kept = new_token_probs(packed, vocab_size, stack.column_ids)
        adjustments = adjustments_struct([spec.adjustments for spec in specs], stack.columns, stack.num_ids)
        most = self._library.generate(
            stack.struct,
            struct,
            counts.buffer_info()[0],
            width,
            min(vocab_size, stack.num_ids),
            packed.rows,
            adjustments,
            packed.uniforms,
            packed.keys,
            token_probs,
            packed.num_prob_rows,
            generated.buffer_info()[0],
            room,
            threads,
        )
        return _written(generated, lens, most, probs, ids)

    def grow(
        self,
        stack: Stack,
        batch: StackBatch,
        rotation: tuple[Tensor, Tensor],
        shapes: Sequence[Sequence[int]],
        vocab_size: int,
        specs: Sequence[DrawSpec],
        states: States | None = None,
    ) -> list[list[int]]:
        """Read a batch that wants each span's last row, and grow a tree after each span, level by level, in one call. shapes: for each
        span the parents of its tree's nodes, as in Proposal. specs: greedy, or with keys, one for each level; they choose the children
        of a node, best first, from the first vocab_size ids. states: as in generate. The span's store needs room for the nodes that
        have children.

        -> for each span the token of each node; -1 for nodes that did not grow, after a row with a NaN or with fewer possible ids than
        children. Raises ValueError if slots are not positions, and for specs that draw.
        """
        if batch.slots is not None:
            raise ValueError("trees can grow only after chains: slots must equal positions")
        if any(spec.is_drawn for spec in specs):
            raise ValueError("the tokens of a tree must be chosen greedily or with shared noise, never drawn")
        levels = [_level_sizes(shape) for shape in shapes]
        for span, sizes in zip(batch.spans, levels, strict=True):
            _check_room(stack, span, sizes)
        widest = max((sum(sizes) for sizes in zip_longest(*levels, fillvalue=0)), default=0)
        logits = torch.empty(max(len(batch.wanted), widest), stack.vocab_size)
        struct, _memory = batch_struct(stack, batch, rotation, logits, states=states)
        packed, counts = PackedDrawSpecs(specs), array("q", map(len, shapes))
        adjustments = adjustments_struct([spec.adjustments for spec in specs], stack.columns, stack.num_ids)
        parents = array("q", chain.from_iterable(shapes))
        grown = array("q", [-1]) * len(parents)
        threads = torch.get_num_threads()
        self._library.grow(
            stack.struct,
            struct,
            counts.buffer_info()[0],
            parents.buffer_info()[0],
            min(vocab_size, stack.num_ids),
            packed.rows,
            adjustments,
            packed.keys,
            grown.buffer_info()[0],
            self._room(self._levels_workspace(stack, struct, widest, max(map(len, levels)))),
            threads,
        )
        return [grown[end - count : end].tolist() for end, count in zip(accumulate(counts), counts, strict=True)]

    def _levels_workspace(self, stack: Stack, batch: BatchStruct, widest: int, depth: int) -> int:
        """Bytes for a batch, and for the levels of the trees after its spans."""
        threads = torch.get_num_threads()
        level = BatchStruct.from_buffer_copy(batch)
        level.num_rows = level.num_wanted = max(batch.num_rows, widest)
        more = _SCORES_OF_A_KEY * (depth + _KEY_UNIT) * threads
        size: int = self._library.stack_workspace(stack.struct, level, threads)
        return size + more

    def choose_chains(
        self, logits: Tensor, markov: MarkovFactors, chains: Chains, vocab_size: int, specs: Sequence[DrawSpec]
    ) -> tuple[list[list[int]], Tensor | None, Tensor | None]:
        """Choose tokens from given logits, correcting each row by the token before it. logits: [R, D] float32 -> as generate

        Raises ValueError for tensors that do not fit each other, and for rows and tokens that are out of range.
        """
        _check_chains(logits, markov, chains)
        num_ids = logits.shape[1] if markov.target_ids is None else len(markov.first)
        logits, packed, width = logits.contiguous(), PackedDrawSpecs(specs), max(chains.lens)
        numbers = [array("q", each) for each in chains]
        chosen = array("q", [-1]) * (len(chains.lens) * width)
        token_probs, probs, ids, _kept = new_token_probs(packed, vocab_size, markov.target_ids)
        adjustments = adjustments_struct([spec.adjustments for spec in specs], markov.columns, num_ids)
        most = self._library.choose_chains(
            markov.second.struct,
            markov.first.data_ptr(),
            logits.data_ptr(),
            *(each.buffer_info()[0] for each in numbers),
            len(chains.lens),
            width,
            address(markov.target_ids),
            min(vocab_size, num_ids, len(markov.first)),
            packed.rows,
            adjustments,
            packed.uniforms,
            packed.keys,
            token_probs,
            packed.num_prob_rows,
            chosen.buffer_info()[0],
            self._room(self._library.linear_workspace(markov.second.struct, len(chains.lens))),
            torch.get_num_threads(),
        )
        return _written(chosen, chains.lens, most, probs, ids)

    def adjust(
        self,
        logits: Tensor,
        rows: Sequence[int],
        adjustments: Sequence[Adjustments],
        generated: Sequence[Sequence[int]],
    ) -> None:
        """Adjust rows of logits [R, V] float32 in place, each after the tokens that were generated since its adjustments were made.

        Raises ValueError for logits of another form and for rows that are out of range.
        """
        if logits.dtype != torch.float32 or logits.dim() != 2 or not logits.is_contiguous():
            raise ValueError(f"logits must be contiguous float32 [R, V], not {logits.dtype} {tuple(logits.shape)}")
        if not 0 <= min(rows) <= max(rows) < len(logits):
            raise ValueError(f"rows must be from 0 to {len(logits) - 1}: got {min(rows)} to {max(rows)}")
        places, tokens = array("q", rows), array("q", chain.from_iterable(generated))
        ends = array("q", accumulate(map(len, generated)))
        self._library.adjust_rows(
            logits.data_ptr(),
            logits.shape[1],
            adjustments_struct(adjustments, None, logits.shape[1]),
            places.buffer_info()[0],
            len(rows),
            tokens.buffer_info()[0],
            ends.buffer_info()[0],
            torch.get_num_threads(),
        )

    def choose(self, logits: Tensor, specs: Sequence[DrawSpec]) -> list[int]:
        """Choose one token for each row, with a spec each; -1 for a row with a NaN. logits: [R, V] -> R ids"""
        logits, packed = _checked_logits(logits), PackedDrawSpecs(specs)
        rows = _rows_of(logits)
        ids = array("q", [-1]) * rows[2]
        self._library.choose(
            *rows,
            packed.rows,
            packed.uniforms,
            packed.keys,
            ids.buffer_info()[0],
            torch.get_num_threads(),
        )
        return ids.tolist()

    def token_probs(
        self, logits: Tensor, temperatures: Sequence[float], truncation: tuple[int, float, float]
    ) -> tuple[Tensor, Tensor]:
        """Truncated distributions, likeliest ids first; NaN throughout for a row with a NaN. logits: [R, V] -> float32 [R, W], ids
        [R, W]; rows that keep fewer than W ids are padded with probability 0"""
        logits = _checked_logits(logits)
        num_rows, width = logits.shape
        packed, room = (
            PackedDrawSpecs([DrawSpec(temperature, truncation) for temperature in temperatures]),
            min(width, _FIRST_WIDTH),
        )
        while True:
            probs = torch.empty(num_rows, room)
            ids = torch.empty(num_rows, room, dtype=torch.int64)
            most = self._library.token_probs(
                *_rows_of(logits),
                packed.rows,
                room,
                probs.data_ptr(),
                ids.data_ptr(),
                torch.get_num_threads(),
            )
            if most <= room:
                return probs[:, :most], ids[:, :most]
            room = most

    def verify(self, logits: Tensor, batch: VerificationBatch) -> VerificationResult:
        """Verify sampled drafts: compute the distributions, apply the rules and draw the next tokens in one call. logits: [rows, V]"""
        logits = _checked_logits(logits)
        if batch.kept_ids is None and batch.probs.shape[1] != logits.shape[1]:
            raise ValueError(
                f"draft distributions over {batch.probs.shape[1]} ids do not match logits over {logits.shape[1]}"
            )
        struct, _memory = verification_struct(batch)
        outcomes = array("q", [0, 0]) * struct.num_sequences
        bad = bytearray(logits.shape[0])
        stops = array("d", [0.0]) * (struct.num_sequences * (struct.max_len + 1))
        self._library.verify(
            logits.data_ptr(),
            logits.dtype == torch.float32,
            logits.shape[1],
            struct,
            outcomes.buffer_info()[0],
            (c_char * len(bad)).from_buffer(bad),
            stops.buffer_info()[0],
            torch.get_num_threads(),
        )
        bad_rows = [r for r, is_bad in enumerate(bad) if is_bad]
        return VerificationResult(outcomes[::2].tolist(), outcomes[1::2].tolist(), bad_rows, stops)

    def argmax(self, logits: Tensor) -> Tensor:
        """The first index of each row's largest number, or of its first NaN. [R, V] bfloat16 or float32 -> [R]"""
        logits = _checked_logits(logits)
        num_rows = len(logits)
        ids = torch.empty(num_rows, dtype=torch.int64)
        self._library.argmax(
            *_rows_of(logits),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return ids

    def top(self, logits: Tensor, temperatures: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely ids under softmax(logits / T), most likely first, ties by id. Results for bfloat16 logits equal
        those for the same numbers in float32. logits: [R, V], temperatures: [R] -> float32 [R, count], [R, count]
        """
        logits, temperatures = _checked_logits(logits), temperatures.to(torch.float32).contiguous()
        num_rows = len(logits)
        probs = torch.empty(num_rows, count)
        ids = torch.empty(num_rows, count, dtype=torch.int64)
        self._library.top(
            *_rows_of(logits),
            temperatures.data_ptr(),
            count,
            probs.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return probs, ids

    def softmax(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """softmax(logits / T), the sums of p log p in nats, and the likeliest ids. logits: [R, V]
        -> float32 [R, V], float32 [R], int64 [R]"""
        logits = _checked_logits(logits)
        num_rows, width = logits.shape
        probs, negative_entropy = torch.empty(num_rows, width), torch.empty(num_rows)
        likeliest = torch.empty(num_rows, dtype=torch.int64)
        self._library.softmax(
            *_rows_of(logits),
            temperature,
            probs.data_ptr(),
            negative_entropy.data_ptr(),
            likeliest.data_ptr(),
            torch.get_num_threads(),
        )
        return probs, negative_entropy, likeliest

    def distill(
        self,
        logits: Tensor,
        temperature: float,
        target: tuple[Tensor, Tensor, Tensor],
        places: Tensor | None,
        kl_share: float,
        gradient: Tensor,
    ) -> Tensor:
        """kl_share · KL(p, q) + (1 - kl_share) · TV(p, q) of each row, where q = softmax(logits / T). logits: [R, V]. target: the results
        of softmax for N rows. places: [R], the target's row that each row is compared with; None: all, in order. gradient: [R, V], like
        logits and contiguous, is written -> for each row the loss, the sum of min(p, q), and whether p and q have the same likeliest
        id, [R, 3] float64

        Raises ValueError for shapes that do not fit, and places that are out of range.
        """
        logits = _checked_logits(logits)
        probs, negative_entropy, likeliest = (each.contiguous() for each in target)
        places = None if places is None else places.to(torch.int64).contiguous()
        _check_places(logits, probs, places)
        if gradient.shape != logits.shape or gradient.dtype != logits.dtype or not gradient.is_contiguous():
            raise ValueError(f"the gradient must be contiguous, of shape {list(logits.shape)} and dtype {logits.dtype}")
        num_rows = len(logits)
        sums = torch.empty(num_rows, 3, dtype=torch.float64)
        self._library.distill(
            *_rows_of(logits),
            temperature,
            probs.data_ptr(),
            negative_entropy.data_ptr(),
            likeliest.data_ptr(),
            address(places),
            kl_share,
            gradient.data_ptr(),
            sums.data_ptr(),
            torch.get_num_threads(),
        )
        return sums

    def _room(self, num_bytes: int) -> int:
        """The address of scratch memory that the calls of a thread reuse: fresh memory costs more than most calls."""
        if self._workspaces.memory.numel() < num_bytes:
            self._workspaces.memory = torch.empty(2 * num_bytes, dtype=torch.uint8)
        return self._workspaces.memory.data_ptr()


def _check_positions(stack: Stack, batch: StackBatch, lens: Sequence[int]) -> None:
    """Check the positions of the generated tokens that will be read. Those of the batch are checked with the batch."""
    if stack.num_positions is None:
        return
    last = max(span.start + span.num_rows + count - 2 for span, count in zip(batch.spans, lens, strict=True))
    if last >= stack.num_positions:
        raise ValueError(f"positions must be from 0 to {stack.num_positions - 1}: {last} would be generated")


def _level_sizes(shape: Sequence[int]) -> list[int]:
    """How many nodes with children each level of a tree has. shape: the parents of its nodes."""
    depths = depths_of(shape)
    sizes = Counter(depths[parent] for parent in set(shape) if parent != ROOT)
    return [sizes[depth] for depth in sorted(sizes)]


def _check_room(stack: Stack, span: CacheSpan, level_sizes: Sequence[int]) -> None:
    """Check that there are slots and positions for the nodes of a tree that will be read."""
    end = span.start + span.num_rows
    if end + sum(level_sizes) > span.capacity:
        raise ValueError(f"a tree of {sum(level_sizes)} nodes with children needs as many slots, starting at {end}")
    if stack.num_positions is not None and end + len(level_sizes) > stack.num_positions:
        raise ValueError(
            f"positions must be from 0 to {stack.num_positions - 1}: a tree reaches {end + len(level_sizes) - 1}"
        )


def _check_chains(logits: Tensor, markov: MarkovFactors, chains: Chains) -> None:
    num_rows, num_columns = logits.shape
    num_tokens, rank = markov.first.shape
    if logits.dtype != torch.float32 or markov.second.shape != (num_columns, rank):
        raise ValueError(
            f"a Markov factor of shape {tuple(markov.second.shape)} does not fit {logits.dtype} logits of {num_columns} columns"
        )
    if not all(0 <= row < row + count <= num_rows for row, count in zip(chains.first_rows, chains.lens, strict=True)):
        raise ValueError(f"chains extend beyond the {num_rows} rows of logits")
    if not all(0 <= token < num_tokens for token in chains.previous):
        raise ValueError(f"tokens before chains must be ids below {num_tokens}")


def _written(
    tokens: array[int], lens: Sequence[int], most: int, probs: Tensor | None, ids: Tensor | None
) -> tuple[list[list[int]], Tensor | None, Tensor | None]:
    """The results of generate, from the library's buffers. tokens: [len(lens), width], -1 from a row with a NaN on. most: the most ids
    that a truncated distribution keeps."""
    width = max(lens)
    found = [
        [token for token in tokens[first : first + count] if token >= 0]
        for first, count in zip(range(0, len(tokens), width), lens, strict=True)
    ]
    if ids is None or probs is None or most == probs.shape[1]:
        return found, probs, ids
    return found, probs[:, :most], ids[:, :most]


class _Workspaces(threading.local):
    """Scratch memory, one for each thread: calls run without the interpreter's lock."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


def _rows_of(logits: Tensor) -> tuple[int, bool, int, int]:
    """The library's first arguments: the address, whether it holds float32, the rows and the width. logits: [R, V], checked"""
    return logits.data_ptr(), logits.dtype == torch.float32, logits.shape[0], logits.shape[1]


def _checked_logits(logits: Tensor) -> Tensor:
    if logits.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"logits must be bfloat16 or float32, not {logits.dtype}")
    return logits.contiguous()


def _check_places(logits: Tensor, probs: Tensor, places: Tensor | None) -> None:
    """Raises ValueError unless each row of logits [R, V] has a row of probs [N, V] to be compared with."""
    num_rows, width = probs.shape
    if width != logits.shape[1] or len(logits) != (num_rows if places is None else len(places)):
        raise ValueError(
            f"logits of shape {list(logits.shape)} cannot be compared with probabilities of shape {list(probs.shape)}"
        )
    if places is not None and len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_rows:
        raise ValueError(f"places must be from 0 to {num_rows - 1}: got {int(places.min())} to {int(places.max())}")
