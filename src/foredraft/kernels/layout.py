"""How matrices, decoders and passes lie in memory for the compiled library: its structs, and what keeps them alive."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BF16, INT8 = 0, 1
_LARGEST_INT8 = 127
_NUMBERS_AT_A_TIME = 1 << 20
_GATED = 32


class MatrixStruct(ctypes.Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("corrections", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int64),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        ("window", c_int64),
    ]


class StackStruct(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", MatrixStruct),
        *(
            (name, c_int64)
            for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")
        ),
        ("epsilon", c_float),
        ("scale", c_float),
    ]


class BatchStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "wanted", "cos", "sin", "spans", "stores", "logits")),
        *((name, c_int64) for name in ("num_rows", "num_wanted", "num_spans")),
    ]


class AttentionCallStruct(ctypes.Structure):
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


class TokenProbsStruct(ctypes.Structure):
    _fields_ = [("probs", c_void_p), ("ids", c_void_p), ("kept", c_void_p), ("width", c_int64)]


class VerificationBatchStruct(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                *("first_rows", "lens", "places", "specs", "rules"),
                *("ids", "prob_rows", "probs", "kept_ids", "uniforms"),
            )
        ),
        *((name, c_int64) for name in ("num_sequences", "max_len", "columns", "probs_stride", "kept_stride")),
    ]


_DRAW_SPEC = struct.Struct("4q4f")
_GREEDY, _DRAWN, _SHARED = 0, 1, 2
_GREEDY_SPEC = _DRAW_SPEC.pack(_GREEDY, 0, 0, 0, 0.0, 1.0, 0.0, 0.0)


class DrawSpec(NamedTuple):
    """How tokens are chosen, one after another: the likeliest (temperature 0), or by the noise that is given for each, from
    softmax(logits / temperature), truncated.

    truncation: (top_k, top_p, min_p), or None where every id is kept. uniforms: in [0, 1), for tokens that are drawn.
    keys: of noise that another's choice hears too (see sampling/noise.py).
    """

    temperature: float = 0.0
    truncation: tuple[int, float, float] | None = None
    uniforms: Sequence[float] = ()
    keys: Sequence[int] = ()

    @property
    def is_drawn(self) -> bool:
        return len(self.uniforms) > 0


class PackedDrawSpecs:
    """Ways laid out for the kernels. rows, uniforms, keys: as they lie in memory. num_laws: of the tokens that are drawn, way after way; truncates: whether any does."""

    def __init__(self, specs: Sequence[DrawSpec]) -> None:
        self.num_prob_rows, self.truncates = 0, False
        rows: list[bytes] = []
        uniforms: list[float] = []
        keys: list[int] = []
        for spec in specs:
            if spec.temperature == 0:
                rows.append(_GREEDY_SPEC)
                continue
            top_k, top_p, min_p = spec.truncation or (0, 1.0, 0.0)
            kind = _DRAWN if spec.is_drawn else _SHARED
            first = len(uniforms) if kind == _DRAWN else len(keys)
            rows.append(_DRAW_SPEC.pack(kind, first, self.num_prob_rows, top_k, spec.temperature, top_p, min_p, 0.0))
            uniforms += spec.uniforms
            keys += spec.keys
            if kind == _DRAWN:
                self.num_prob_rows += len(spec.uniforms)
                self.truncates |= spec.truncation is not None
        self.rows = b"".join(rows)
        self.uniforms = struct.pack(f"{len(uniforms)}d", *uniforms)
        self.keys = struct.pack(f"{len(keys)}q", *keys)


RULES = ("rejection", "block")
"""What sampled drafts can be weighed by, in the library's order."""


@dataclass(frozen=True, slots=True)
class VerificationBatch:
    """Sequences whose draft tokens are weighed against the laws that they were drawn from.

    first_rows: where each one's lens[b] + 1 rows of logits begin. places: its row of ids and law_rows [B, K] int64 (-1: it was
    certain). ways: the target's. rules: of RULES. probs: [R, C] float32, the drafts' laws on kept_ids [R, C] (None: on all).
    uniforms: in [0, 1), two for each sequence.
    """

    first_rows: Sequence[int]
    lens: Sequence[int]
    places: Sequence[int]
    specs: Sequence[DrawSpec]
    rules: Sequence[str]
    ids: Tensor
    prob_rows: Tensor
    probs: Tensor
    kept_ids: Tensor | None
    uniforms: Sequence[float]


class VerificationResult(NamedTuple):
    """num_accepted, next_ids: of each sequence. bad_rows: of logits, where they are no law. stops: [B, K + 1], the law of
    how many draft tokens stand."""

    num_accepted: list[int]
    next_ids: list[int]
    bad_rows: list[int]
    stops: array[float]


class PackedMatrix:
    """One matrix laid out for the kernels. tensors: what has to stay alive."""

    def __init__(self, out_features: int, in_features: int, kind: int, tensors: dict[str, Tensor]) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.tensors = tensors
        addresses = (address(tensors.get(name)) for name in ("weights", "scales", "corrections", "bias"))
        self.struct = MatrixStruct(*addresses, out_features, in_features, kind)


class AttentionShape(NamedTuple):
    """What a layer's attention does with its scores. window: how many keys a query sees, its own included; 0: all.
    softcap: 0 for none. sinks: [Hq] float32, or None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackSpan:
    """Rows first_row .. of a pass are positions start .. of one sequence. stores: [layers, 2], where its keys
    [H, capacity, D] and values of each layer lie."""

    first_row: int
    num_rows: int
    start: int
    capacity: int
    stores: array[int]


@dataclass(frozen=True, slots=True)
class StackPass:
    """A flattened ragged batch. wanted: the rows whose logits to give. rotation: cos and sin, [positions, D / 2] float32."""

    ids: Sequence[int]
    positions: Sequence[int]
    wanted: Sequence[int]
    spans: Sequence[StackSpan]
    rotation: tuple[Tensor, Tensor]


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
        structs = (LayerStruct * len(layers))(*(_layer_struct(layer) for layer in layers))
        self.struct = StackStruct(
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


def _layer_struct(layer: StackLayer) -> LayerStruct:
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    matrices = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return LayerStruct(*map(address, norms), *(matrix.struct for matrix in matrices), layer.window)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to nearest on a grid of 127 steps up to each output channel's largest weight.

    weight: [n, k] float -> ([n, k] int8, scales [n] float32)
    """
    whole = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    num_rows = max(1, _NUMBERS_AT_A_TIME // max(1, weight.shape[1]))  # a wide matrix is never there in float32
    for first in range(0, weight.shape[0], num_rows):
        some = slice(first, first + num_rows)
        rows = weight[some].detach().to(torch.float32, copy=True)
        scales[some] = scale = rows.abs().amax(1) / _LARGEST_INT8
        whole[some] = rows.div_(scale.clamp(min=1e-30)[:, None]).round_().to(torch.int8)
    return whole, scales


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up, 32 by 32, zero rows where the last are fewer. [n, k] each -> [2 * ceil(n / 32) * 32, k]"""
    missing = -gate.shape[0] % _GATED
    padded = [torch.nn.functional.pad(part, (0, 0, 0, missing)) if missing else part for part in (gate, up)]
    return torch.stack([part.view(-1, _GATED, part.shape[1]) for part in padded], dim=1).flatten(0, 2)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
