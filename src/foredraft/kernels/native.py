"""The compiled library's functions, on tensors. Shapes are checked here: behind this file there are only addresses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BF16, _INT8 = 0, 1
_LARGEST_INT8 = 127
_ROWS_AT_A_TIME = 1024
_GATED = 32
_SCORES_OF_A_KEY, _KEY_UNIT = 32, 16
"""Bytes of scratch that a key takes of each thread, and how many keys it is rounded up to."""


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("corrections", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int64),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate_up", "down")),
        ("window", c_int64),
    ]


class _Stack(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", _Matrix),
        *(
            (name, c_int64)
            for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")
        ),
        ("epsilon", c_float),
        ("scale", c_float),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "wanted", "cos", "sin", "spans", "stores", "logits")),
        *((name, c_int64) for name in ("num_rows", "num_wanted", "num_spans")),
    ]


class _AttentionCall(ctypes.Structure):
    _fields_ = [
        ("query", c_void_p),
        ("query_head", c_int64),
        ("query_row", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("capacity", c_int64),
        ("mask", c_void_p),
        ("mask_keys", c_int64),
        ("sinks", c_void_p),
        ("output", c_void_p),
        *(
            (name, c_int64)
            for name in ("num_rows", "start", "num_heads", "num_kv_heads", "key_dim", "value_dim", "window")
        ),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class PackedMatrix:
    """One matrix laid out for the kernels. tensors: what has to stay alive; in num_bytes of memory."""

    def __init__(self, out_features: int, in_features: int, kind: int, tensors: dict[str, Tensor]) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.is_int8 = kind == _INT8
        self.tensors = tensors
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        addresses = (_address(tensors.get(name)) for name in ("weights", "scales", "corrections", "bias"))
        self.struct = _Matrix(*addresses, out_features, in_features, kind)


class AttentionShape(NamedTuple):
    """What a layer's attention does with its scores. window: how many keys a query sees, its own included; 0: all.
    softcap: 0 for none. sinks: [Hq] float32, or None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackSpan:
    """Rows first_row .. of a pass are positions start .. of one sequence. stores: [layers, 2] int64, where its keys
    [H, capacity, D] and values of each layer lie."""

    first_row: int
    num_rows: int
    start: int
    capacity: int
    stores: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StackLayer:
    """norms: input and post [hidden], query and key [D] or None, all float32."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    window: int


class Stack:
    """A whole decoder. embedding: [V, hidden] bfloat16. final_norm: [hidden] float32."""

    def __init__(
        self,
        layers: Sequence[StackLayer],
        embedding: Tensor,
        final_norm: Tensor,
        head: PackedMatrix,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        epsilon: float,
        scale: float,
    ) -> None:
        self.keeps = (layers, embedding, final_norm, head)
        self.num_layers, self.vocab_size = len(layers), head.out_features
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.num_embeddings = embedding.shape[0]
        structs = (_Layer * len(layers))(*(_layer_struct(layer) for layer in layers))
        self.struct = _Stack(
            structs,
            embedding.data_ptr(),
            final_norm.data_ptr(),
            head.struct,
            len(layers),
            embedding.shape[1],
            num_heads,
            num_kv_heads,
            head_dim,
            layers[0].down.in_features,
            epsilon,
            scale,
        )


def _layer_struct(layer: StackLayer) -> _Layer:
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return _Layer(*map(_address, norms), *(matrix.struct for matrix in matrices), layer.window)


class Kernels:
    """The library at `path`. Every row's bits depend on that row alone, whatever shares its pass."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("packed_bytes", "linear_workspace", "attention_workspace", "stack_workspace"):
            getattr(self._library, name).restype = c_int64
        for name in ("pack", "linear", "attention", "stack", "write", "argmax", "top"):
            getattr(self._library, name).restype = None
        self._workspaces = _Workspaces()

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> PackedMatrix:
        """weight: [out, in], any float dtype; bias: [out]. int8: quantised, one scale per output channel."""
        n, k = weight.shape
        tensors: dict[str, Tensor] = {}
        if bias is not None:
            tensors["bias"] = bias.detach().float().contiguous()
        if int8:
            source, tensors["scales"] = quantised(weight)
            tensors["corrections"] = torch.zeros(n, dtype=torch.int32)
        else:
            source = weight.detach().to(torch.bfloat16).contiguous()
        kind = _INT8 if int8 else _BF16
        tensors["weights"] = torch.empty(
            self._library.packed_bytes(c_int64(n), c_int64(k), c_int64(kind)), dtype=torch.uint8
        )
        self._library.pack(
            c_void_p(source.data_ptr()),
            c_int64(n),
            c_int64(k),
            c_int64(kind),
            c_void_p(tensors["weights"].data_ptr()),
            c_void_p(_address(tensors.get("corrections"))),
        )
        return PackedMatrix(n, k, kind, tensors)

    def linear(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """x: [..., in] bfloat16 -> [..., out] bfloat16"""
        if x.shape[-1] != matrix.in_features or x.dtype != torch.bfloat16:
            raise ValueError(f"rows of {matrix.in_features} bfloat16 are needed, not {x.shape[-1]} {x.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], matrix.out_features)
        num_rows = x.numel() // matrix.in_features
        struct = ctypes.byref(matrix.struct)
        workspace = self._room(self._library.linear_workspace(struct, c_int64(num_rows)))
        self._library.linear(
            struct, c_void_p(x.data_ptr()), c_void_p(out.data_ptr()), c_int64(num_rows), workspace, _num_threads()
        )
        return out

    def attend(
        self,
        spans: Sequence[tuple[slice, int, Tensor, Tensor, Tensor | None]],
        query: Tensor,
        shape: AttentionShape,
        num_rows: int,
    ) -> Tensor:
        """Attention of one layer over several sequences.

        spans: (rows, position of the first, keys [H, N, Dk], values [H, N, Dv], mask [R, N] bool or None) of each; the
        strides of keys and values are those of a capacity, and N is a multiple of 16. query: [Hq, T, Dk] bfloat16.
        -> [num_rows, Hq, Dv] bfloat16; rows of no span are zero
        """
        tensors = [query, *(tensor for _, _, keys, values, _ in spans for tensor in (keys, values))]
        if any(tensor.dtype != torch.bfloat16 for tensor in tensors):
            raise ValueError("queries, keys and values must be bfloat16")
        values = spans[0][3]
        out = query.new_zeros(num_rows, query.shape[0], values.shape[2])
        if query.stride(2) != 1:
            query = query.contiguous()
        calls = (_AttentionCall * len(spans))(*(_call(span, query, shape, out) for span in spans))
        longest = max(start + rows.stop - rows.start for rows, start, *_ in spans)
        room = self._library.attention_workspace(c_int64(longest), c_int64(1))
        threads = torch.get_num_threads()
        self._library.attention(calls, c_int64(len(spans)), self._room(room * threads), c_int64(room), c_int64(threads))
        return out

    def read(
        self,
        stack: Stack,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        spans: Sequence[StackSpan],
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """One pass of a decoder. rotation: cos and sin, [positions, D / 2] float32. -> logits [len(wanted), V] bfloat16"""
        logits = torch.empty(len(wanted), stack.vocab_size, dtype=torch.bfloat16)
        batch, _held = _batch(stack, ids, positions, wanted, spans, rotation, logits)
        threads = _num_threads()
        addresses = ctypes.byref(stack.struct), ctypes.byref(batch)
        self._library.stack(*addresses, self._room(self._library.stack_workspace(*addresses, threads)), threads)
        return logits

    def write(
        self,
        stack: Stack,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        spans: Sequence[StackSpan],
        rotation: tuple[Tensor, Tensor],
        lens: Sequence[int],
        vocab_size: int,
    ) -> list[list[int]]:
        """As read, wanting every span's last row, and then on greedily: lens[i] >= 1 tokens behind span i, of the first
        vocab_size ids, in one call. The last one is not read; NaN logits end a span's tokens before it."""
        logits = torch.empty(len(wanted), stack.vocab_size, dtype=torch.bfloat16)
        batch, _held = _batch(stack, ids, positions, wanted, spans, rotation, logits)
        counts, width = np.array(lens, dtype=np.int64), max(lens)
        written = np.full((len(spans), width), -1, dtype=np.int64)
        threads = _num_threads()
        addresses = ctypes.byref(stack.struct), ctypes.byref(batch)
        # the last pass has the longest context, and a row a span
        num_bytes = (
            self._library.stack_workspace(*addresses, threads) + _SCORES_OF_A_KEY * (width + _KEY_UNIT) * threads.value
        )
        self._library.write(
            *addresses,
            c_void_p(counts.ctypes.data),
            c_int64(width),
            c_int64(min(vocab_size, stack.vocab_size)),
            c_void_p(written.ctypes.data),
            self._room(num_bytes),
            threads,
        )
        return [
            [token for token in row[:count] if token >= 0] for row, count in zip(written.tolist(), lens, strict=True)
        ]

    def argmax(self, logits: Tensor) -> Tensor:
        """The first place of each row's largest number, or of its first NaN. [R, V] bfloat16 or float32 -> [R]"""
        logits = _checked_logits(logits)
        num_rows, width = logits.shape
        ids = torch.empty(num_rows, dtype=torch.int64)
        self._library.argmax(
            c_void_p(logits.data_ptr()),
            c_int64(logits.dtype == torch.float32),
            c_int64(num_rows),
            c_int64(width),
            c_int64(width),
            c_void_p(ids.data_ptr()),
            _num_threads(),
        )
        return ids

    def top(self, logits: Tensor, temperatures: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely ids under softmax(logits / T), most likely first, of equals the first; the same numbers
        from bfloat16 as from those numbers in float32. logits: [R, V], temperatures: [R] -> float32 [R, count], [R, count]
        """
        logits, temperatures = _checked_logits(logits), temperatures.to(torch.float32).contiguous()
        num_rows, width = logits.shape
        probs = torch.empty(num_rows, count)
        ids = torch.empty(num_rows, count, dtype=torch.int64)
        self._library.top(
            c_void_p(logits.data_ptr()),
            c_int64(logits.dtype == torch.float32),
            c_int64(num_rows),
            c_int64(width),
            c_void_p(temperatures.data_ptr()),
            c_int64(count),
            c_void_p(probs.data_ptr()),
            c_void_p(ids.data_ptr()),
            _num_threads(),
        )
        return probs, ids

    def _room(self, num_bytes: int) -> c_void_p:
        """Memory that every call of a thread uses again: fresh memory costs more than most calls."""
        if self._workspaces.memory.numel() < num_bytes:
            self._workspaces.memory = torch.empty(2 * num_bytes, dtype=torch.uint8)
        return c_void_p(self._workspaces.memory.data_ptr())


class _Workspaces(threading.local):
    """One for each thread: a call runs without the interpreter's lock."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


def _batch(
    stack: Stack,
    ids: Sequence[int],
    positions: Sequence[int],
    wanted: Sequence[int],
    spans: Sequence[StackSpan],
    rotation: tuple[Tensor, Tensor],
    logits: Tensor,
) -> tuple[_Batch, tuple[object, ...]]:
    """The struct, and what must live as long as it is used."""
    rows, places, kept = (np.array(values, dtype=np.int32) for values in (ids, positions, wanted))
    if not 0 <= rows.min() <= rows.max() < stack.num_embeddings:
        raise ValueError(f"token ids go from 0 to {stack.num_embeddings - 1}: {rows.min()} to {rows.max()} are there")
    bounds = np.array([(s.first_row, s.num_rows, s.start, s.capacity) for s in spans], dtype=np.int64)
    stores = spans[0].stores if len(spans) == 1 else np.concatenate([span.stores for span in spans])
    cos, sin = rotation
    batch = _Batch(
        rows.ctypes.data,
        places.ctypes.data,
        kept.ctypes.data,
        cos.data_ptr(),
        sin.data_ptr(),
        bounds.ctypes.data,
        stores.ctypes.data,
        logits.data_ptr(),
        len(ids),
        len(wanted),
        len(spans),
    )
    return batch, (rows, places, kept, bounds, stores)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to nearest on a grid of 127 steps up to each output channel's largest weight.

    weight: [n, k] float -> ([n, k] int8, scales [n] float32)
    """
    whole = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        rows = weight[first : first + _ROWS_AT_A_TIME].detach().float()
        scale = rows.abs().amax(1) / _LARGEST_INT8
        scales[first : first + _ROWS_AT_A_TIME] = scale
        whole[first : first + _ROWS_AT_A_TIME] = (rows / scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    return whole, scales


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up, 32 by 32, zero rows where the last are fewer. [n, k] each -> [2 * ceil(n / 32) * 32, k]"""
    missing = -gate.shape[0] % _GATED
    padded = [torch.nn.functional.pad(part, (0, 0, 0, missing)) for part in (gate, up)]
    return torch.stack([part.view(-1, _GATED, part.shape[1]) for part in padded], dim=1).flatten(0, 2)


def _call(
    span: tuple[slice, int, Tensor, Tensor, Tensor | None], query: Tensor, shape: AttentionShape, out: Tensor
) -> _AttentionCall:
    rows, start, keys, values, mask = span
    return _AttentionCall(
        query.data_ptr() + rows.start * query.stride(1) * query.element_size(),
        query.stride(0),
        query.stride(1),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) // keys.shape[2],
        _address(mask),
        0 if mask is None else mask.shape[1],
        _address(shape.sinks),
        out[rows].data_ptr(),
        rows.stop - rows.start,
        start,
        query.shape[0],
        keys.shape[0],
        keys.shape[2],
        values.shape[2],
        shape.window,
        shape.scale,
        shape.softcap,
    )


def _checked_logits(logits: Tensor) -> Tensor:
    if logits.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"logits must be bfloat16 or float32, not {logits.dtype}")
    return logits.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _num_threads() -> c_int64:
    return c_int64(torch.get_num_threads())
