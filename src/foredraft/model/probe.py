"""Measure what a model can do when it is loaded, on a few tokens, instead of assuming it from its name.

The library's own forward is the reference: a model whose attention does not pass through our function, that looks ahead, or that mixes
the sequences of a ragged batch gives different logits, and is refused with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from foredraft.engine.region import Region, padded
from foredraft.engine.sources import Source, SourceKeys
from foredraft.errors import ModelError, one_line
from foredraft.kernels import Kernels
from foredraft.model.attention import AttentionMetadata, attend
from foredraft.model.batch import Read, Span
from foredraft.model.diagnosis import why_not_finite
from foredraft.model.input_rounding import GroupOf, never, rounded_inputs
from foredraft.model.language_model import Body, LanguageModel, Traits, library_body
from foredraft.model.pages import give_back
from foredraft.model.progress import bar_of_layers, with_bar
from foredraft.model.stored import StoredEmbedding
from foredraft.model.trial_ids import random_ids
from foredraft.utils.machine import cpu_features

_LENGTHS = (13, 7)
_SPLITS = (7, 3)
_CUTS = (128, 64, 16, 8, 5, 1, 1, 1)
"""The pieces in which a long sequence is read to see whether its bits change: prefill chunks, verifications, single steps."""

PRECISE = (torch.float32, torch.float64)
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)

PRECISE_TOLERANCE, TOLERANCE, _LARGEST_TOLERANCE = 1e-3, 0.1, 0.5
"""The largest relative errors of a row of logits: in float32, in bfloat16, and with rounded inputs. Unrelated logits differ by 1.4."""

_TIMES_ROUNDING = 2.0
"""Rounding int8 weights moves logits about as far as rounding their inputs does: both together 1.4 times as far. The rest is a margin."""

_MOST_COLUMNS = 1 << 14
"""The most columns of logits that are compared with the library's: a row of a large vocabulary takes as much memory as a layer."""

_MOST_LOGITS = 1 << 20
"""The most logits whose bits are compared with those of another reading, though at least those of one row."""

_ROWS_AT_A_TIME = 1024

_LONG, _SHORT = 1056, 64
"""Attention alone is tested with _LONG keys, past the 1,024 at which products change their order, on the last _SHORT rows."""


def probe(
    hf: PreTrainedModel,
    name: str,
    context_len: int,
    prepare: Callable[[PreTrainedModel], Body] = library_body,
    group_of: GroupOf = never,
) -> LanguageModel:
    """Read short sequences in every way the engine will. Raises ModelError, with the reason, if one differs.

    prepare: makes the model's body, after the library's own forward has run. group_of: which inputs that body rounds.
    """
    _refuse_unsound_embeddings(hf, name)
    draft, bytes_per_token = _compared(hf, name, context_len, prepare, group_of)
    give_back([])  # free two sets of a large vocabulary's logits before the next ones
    traits = replace(draft.traits, bytes_per_token=bytes_per_token, row_exact=_is_row_exact(draft))
    return LanguageModel(hf, traits, draft.body)


def _compared(
    hf: PreTrainedModel,
    name: str,
    context_len: int,
    prepare: Callable[[PreTrainedModel], Body],
    group_of: GroupOf,
) -> tuple[LanguageModel, int]:
    """The model with its body, whose logits have been compared with the library's, and the bytes of cache per token."""
    sequences = _random_sequences(hf, [max(1, min(n, context_len)) for n in _LENGTHS])
    first = sequences[0]
    batch = [*sequences, first[: (len(first) + 1) // 2], first]
    vocab_size, (*reference, beginning, rounded) = _references(hf, name, batch, group_of)
    _refuse_if_it_looks_ahead(name, beginning, reference[0])
    tolerance = tolerance_of(rounded, reference[0])
    body = prepare(hf)
    give_back([])  # layout has freed memory that the C library would keep
    draft = LanguageModel(hf, Traits(name, vocab_size, context_len, 0, False), body)
    together, region = _read_in_two_passes(draft, sequences)
    if not region.layers:
        raise ModelError(
            f"{name}: its attention does not go through transformers' AttentionInterface; use another model"
        )
    if is_precise(region):
        tolerance = PRECISE_TOLERANCE
    for ours, theirs in zip(together, reference, strict=True):
        if not relative_error(ours, theirs) < tolerance:
            raise ModelError(
                f"{name}: its logits change when sequences share a pass (it has a state or a mask of its own "
                "that attention alone does not explain); use a decoder whose only memory is keys and values"
            )
    return draft, region.bytes_per_token


def _random_sequences(hf: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    vocab_size = int(hf.get_input_embeddings().num_embeddings)
    generator = torch.Generator().manual_seed(0)
    return [random_ids(length, vocab_size, generator) for length in lengths]


@torch.inference_mode()
def _references(
    hf: PreTrainedModel, name: str, sequences: Sequence[list[int]], group_of: GroupOf
) -> tuple[int, list[Tensor]]:
    """The library's number of logits, and some columns of each sequence's logits; those of the last sequence are for rounded inputs. All
    in one pass, because a model with stored weights dequantizes them in every pass. Shorter sequences are padded at the end, where a
    causal model does not look."""
    longest = max(len(tokens) for tokens in sequences)
    ids = torch.tensor([tokens + tokens[-1:] * (longest - len(tokens)) for tokens in sequences], device=hf.device)
    try:
        with bar_of_layers(hf, "Reading"), rounded_inputs(hf, group_of, len(sequences) - 1):
            out = hf(input_ids=ids, use_cache=False)
        logits: Tensor = out.logits
    except Exception as error:
        raise ModelError(f"{name}: its own forward pass fails: {one_line(error)}") from error
    if not _is_sound(logits):
        raise ModelError(f"{name}: {why_not_finite(hf)}")
    columns = _some_columns(logits)
    return logits.shape[-1], [rows[: len(tokens)] for rows, tokens in zip(columns, sequences, strict=True)]


def _is_sound(logits: Tensor) -> bool:
    """Whether there is neither NaN nor infinity, except -inf, which bans a token. The maximum shows both, and takes no memory."""
    largest = logits.amax()
    return not bool(torch.isnan(largest) or torch.isposinf(largest))


def _some_columns(logits: Tensor) -> Tensor:
    """[..., V] -> [..., at most _MOST_COLUMNS], a copy of evenly spaced columns"""
    step = -(-logits.shape[-1] // _MOST_COLUMNS)
    return logits[..., ::step].clone()


def _refuse_unsound_embeddings(hf: PreTrainedModel, name: str) -> None:
    """Raise ModelError for embeddings that are not finite. A few tokens reveal this for all other weights, but they read only their own
    rows of the embeddings."""
    embedding = hf.get_input_embeddings()
    if isinstance(embedding, StoredEmbedding):
        return  # the reader of its file has checked it
    weight = embedding.weight
    if isinstance(weight, DTensor):
        weight = weight.to_local()  # the rows of this rank
    # in parts, because PyTorch sums a float32 copy
    sums = [part.sum(dtype=torch.float32) for part in weight.detach().split(_ROWS_AT_A_TIME)]
    if weight.is_floating_point() and not bool(torch.isfinite(torch.stack(sums)).all()):
        raise ModelError(f"{name}: {why_not_finite(hf)}")


def _refuse_if_it_looks_ahead(name: str, beginning: Tensor, whole: Tensor) -> None:
    """beginning: the logits of the first tokens of `whole`, from a pass in which other tokens follow them."""
    tolerance = PRECISE_TOLERANCE if beginning.dtype in PRECISE else TOLERANCE
    if not relative_error(beginning, whole[: len(beginning)]) < tolerance:
        raise ModelError(f"{name}: a token's logits depend on later tokens (it is an encoder); use a causal decoder")


def _read_in_two_passes(model: LanguageModel, sequences: list[list[int]]) -> tuple[list[Tensor], Region]:
    """Some columns of each sequence's logits, from reading all sequences together, each cut in two at a different place."""
    cache = model.scratch_cache([len(tokens) for tokens in sequences])
    parts = []
    try:
        for half in (0, 1):
            halves = [(tokens[:n], tokens[n:])[half] for tokens, n in zip(sequences, _SPLITS, strict=True)]
            reads = [Read(i, tokens, len(tokens)) for i, tokens in enumerate(halves)]
            logits = _some_columns(model.read(reads, cache))
            parts.append(torch.split(logits, [len(tokens) for tokens in halves]))
            give_back([])  # free a large vocabulary's logits before the next ones
    except Exception as error:
        raise ModelError(
            f"{model.traits.name}: it cannot read a ragged batch through transformers' AttentionInterface "
            f"({one_line(error)}); use another model"
        ) from error
    return [torch.cat(pair) for pair in zip(*parts, strict=True)], cache.region(0)


def _is_row_exact(model: LanguageModel) -> bool:
    """Whether a sequence that is read alone and in pieces gives the same bits as in one pass after another sequence: every key and value
    of every layer, and the last logits.

    Never promised if PyTorch computes a product in float32 (a router's included) or with AMX, and off the CPU only for a body that is
    made for it: other kernels sum in an order that depends on the number of rows, and a few hundred tokens could pass by luck.
    """
    if model.hf.dtype not in _SIXTEEN_BITS:
        return False
    if model.device.type != "cpu" and not model.body.is_batch_invariant:
        return False
    states = states_if_rows_agree(model)
    give_back([])
    return states is not None and (model.body.is_batch_invariant or _is_attention_exact(model, *states))


def states_if_rows_agree(model: LanguageModel, sources: Sequence[Source] = ()) -> tuple[Tensor, Tensor] | None:
    """If the bits are the same, keys and values of one layer without tokens, which have its shapes; otherwise None. The caches are freed.

    sources: two, of the neighbour and of the sequence, for a model with an encoder. The keys and values of the second must agree, too.
    """
    length = min(sum(_CUTS), model.traits.context_len)
    neighbour, tokens = _random_sequences(model.hf, [min(_LENGTHS[1], length), length])
    num_compared = min(length, _CUTS[2], max(1, _MOST_LOGITS // model.traits.vocab_size))
    whole = model.scratch_cache([len(neighbour), length], sources=sources)
    with _UnorderedProducts() as products:
        expected = _digests(model.read([Read(0, neighbour, 0), Read(1, tokens, num_compared)], whole))
    give_back([])
    if products.seen:
        return None
    pieces = model.scratch_cache([length], sources=sources[1:])
    ends = sorted({min(end, length) for end in accumulate(_CUTS, initial=0)})
    wanted = [max(1, min(b - a, b - length + num_compared)) for a, b in pairwise(ends)]
    cuts = list(zip(pairwise(ends), wanted, strict=True))
    alone = [
        row
        for (a, b), count in with_bar(cuts, "Checking")
        for row in _digests(model.read([Read(0, tokens[a:b], count)], pieces))
    ]
    if alone[-num_compared:] != expected or not _same_bits(whole.region(1), pieces.region(0)):
        return None
    if sources and not _same_states(whole.source(1), pieces.source(0)):
        return None
    keys, values = pieces.region(0).layer(next(iter(pieces.region(0).layers)))
    return keys.new_empty(keys.shape[0], 0, keys.shape[2]), values.new_empty(values.shape[0], 0, values.shape[2])


@torch.inference_mode()
def _is_attention_exact(model: LanguageModel, keys: Tensor, values: Tensor) -> bool:
    """The same for attention alone, over contexts too long to send through the whole model. keys, values: give the shapes."""
    num_heads = getattr(model.hf.config.get_text_config(), "num_attention_heads", keys.shape[0])
    length = min(_LONG, model.traits.context_len)
    shapes = ((num_heads, keys.shape[2]), (keys.shape[0], keys.shape[2]), (values.shape[0], values.shape[2]))
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, length, width, generator=generator, dtype=keys.dtype).to(keys.device)
        for heads, width in shapes
    ]
    kernels = model.body.kernels
    whole = _attend_in_pieces(states, [0, length], kernels)
    pieces = _attend_in_pieces(
        states, sorted({0, *range(max(length - _SHORT, 0), length, 5), length - 1, length}), kernels
    )
    return torch.equal(whole, pieces)


def _attend_in_pieces(states: list[Tensor], ends: Sequence[int], kernels: Kernels | None) -> Tensor:
    """states: query, key and value, [1, H, N, D] each -> the last rows, [at most _SHORT, Hq, Dv], read piece by piece."""
    region = Region()
    region.resize(padded(ends[-1]))
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    parts = []
    for start, end in pairwise(ends):
        query, key, value = (state[:, :, start:end] for state in states)
        metadata = AttentionMetadata([Span(region, 0, end - start, start)], kernels=kernels)
        rows = attend(layer, query, key, value, None, attention_metadata=metadata)[0][0]
        parts.append(rows[-_SHORT:].clone())  # without the memory of the others
    return torch.cat(parts)[-_SHORT:]


def _digests(rows: Tensor) -> list[bytes]:
    """A hash of each row's bits, because the rows of a large vocabulary would take much memory."""
    return [hashlib.sha256(row.contiguous().view(torch.uint8).numpy(force=True)).digest() for row in rows]


def _same_bits(a: Region, b: Region) -> bool:
    return all(
        torch.equal(ours, theirs)
        for layer in a.layers  # layer numbers may have gaps: not every layer needs to have attention
        for ours, theirs in zip(a.layer(layer), b.layer(layer), strict=True)
    )


def _same_states(a: SourceKeys | None, b: SourceKeys | None) -> bool:
    assert a is not None
    assert b is not None
    return all(
        torch.equal(ours, theirs)
        for layer, pair in a.layers.items()
        for ours, theirs in zip(pair, b.layers[layer], strict=True)
    )


class _UnorderedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects PyTorch's matrix products that choose their order of summation: in float32, and in sixteen bits if the processor has AMX
    (an outer product, as in rotary embeddings, sums nothing and does not count)."""

    _LEFT = {  # noqa: RUF012 (the index of the left matrix among the arguments)
        torch.ops.aten.mm: 0,
        torch.ops.aten.bmm: 0,
        torch.ops.aten.matmul: 0,
        torch.ops.aten.linear: 0,
        torch.ops.aten.addmm: 1,
        torch.ops.aten.baddbmm: 1,
        torch.ops.mkldnn._linear_pointwise: 0,
    }

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unordered = (torch.float32, *_SIXTEEN_BITS) if "amx_bf16" in cpu_features() else (torch.float32,)
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self._LEFT.get(func.overloadpacket)
        if place is not None and args[place].dtype in self._unordered and args[place].shape[-1] > 1:
            self.seen = True
        return func(*args, **(kwargs or {}))


def is_precise(region: Region) -> bool:
    """Whether the body computes in float32 or more. The keys show it, but the logits do not: a float32 checkpoint may be rounded to int8,
    and the compiled body's logits are always in float32."""
    return all(keys.dtype in PRECISE for keys, _ in map(region.layer, region.layers))


def tolerance_of(rounded: Tensor, exact: Tensor) -> float:
    """How far a body's logits may be from the library's, given how far the library's own move if inputs are rounded as the body rounds
    them: in every layer, so a deep model's move farther."""
    return min(max(TOLERANCE, _TIMES_ROUNDING * relative_error(rounded, exact)), _LARGEST_TOLERANCE)


def relative_error(a: Tensor, b: Tensor) -> float:
    """The relative error of the median row: a leak moves every row, a tie in a router in low precision moves one."""
    # row by row: a large vocabulary's logits would take much memory in float64
    errors = [_relative_error(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    return float(torch.stack(errors).median())


def _relative_error(x: Tensor, y: Tensor) -> Tensor:
    """The error of a row of logits, x, relative to y. Ids that a model never writes have -inf in both, which counts as equal; -inf in one
    alone is an infinite error."""
    differences = torch.where(x == y, 0.0, x - y)
    error: Tensor = differences.norm() / y.masked_fill(y.isinf(), 0.0).norm().clamp(min=1e-9)
    return error
