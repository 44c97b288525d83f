"""Attention and whole decoders, as the compiled library reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int64, pointer
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.kernels.structs import (
    AttentionCallStruct,
    BatchStruct,
    LayerStruct,
    MatrixStruct,
    MlpStruct,
    NormStruct,
    StackStruct,
)
from foredraft.kernels.weights import PackedMatrix, address


class AttentionShape(NamedTuple):
    """What a layer's attention does with its scores. window: how many keys a query sees, its own included; 0: all.
    softcap: 0 for none. sinks: [Hq] float32, or None. bias: [Hq, 2 * farthest + 1] float32, added by the distance key - query, from
    -farthest to farthest; what lies farther counts as that far; or None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    bias: Tensor | None = None


class AttentionSpan(NamedTuple):
    """Rows of a call that belong to one sequence. start: the position of the first. keys: [H, N, Dk], values: [H, N, Dv], whose
    strides are those of a capacity. Keys are read sixteen at a time: N must be a multiple of that, or memory follow that may be read.
    mask: [R, N] bool, or None: all are seen that may be. num_seen: the keys that every row may see; 0: a row may see those up to its
    own position."""

    rows: slice
    start: int
    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    num_seen: int = 0

    @property
    def num_keys(self) -> int:
        """That any of its rows may see."""
        return self.num_seen or self.start + self.rows.stop - self.rows.start


class SourceSpan(NamedTuple):
    """length: of a source. stores: [layers * 2], the addresses of its keys [H, length, D] and values for each layer of a decoder; behind
    the keys is memory that may be read, see AttentionSpan."""

    length: int
    stores: array[int]


class CacheSpan(NamedTuple):
    """Rows first_row .. of a pass belong to one sequence. start: its positions that are in the cache already, at the slots of the
    same numbers. capacity: its slots. stores: [layers * 2], the addresses of the keys [H, capacity, D] and values of each layer.
    source: what its rows attend to beside them, of a decoder that does. paths: for each row the slots of the positions from start to its own, whose keys it sees beside those before start; None: the
    rows are a chain, each at the slot of its position."""

    first_row: int
    num_rows: int
    start: int
    capacity: int
    stores: array[int]
    paths: Sequence[Sequence[int]] | None = None
    source: SourceSpan | None = None


class StackBatch(NamedTuple):
    """A ragged batch whose spans are addresses of memory. ids, positions: [R]. slots: [R], or None where they equal positions.
    wanted: the rows whose logits are computed. See model.RaggedBatch."""

    ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int] | None
    wanted: Sequence[int]
    spans: Sequence[CacheSpan]


SILU, GELU_TANH, CLAMPED_SWIGLU, RELU, GELU = range(5)
"""Activations of an MLP, numbered as in structs.h."""

RMS_NORM, LAYER_NORM = 0, 1
"""Norms, numbered as in structs.h."""


class NormWeights(NamedTuple):
    """weight, bias: [width] float32. No weight: no norm. A bias only for layer norms."""

    weight: Tensor | None = None
    bias: Tensor | None = None


class StackMlp(NamedTuple):
    """up: [intermediate, hidden], or gates and ups interleaved. down: [hidden, intermediate]."""

    up: PackedMatrix
    down: PackedMatrix


NO_NORM = NormWeights()


@dataclass(frozen=True, slots=True)
class StackLayer:
    """norms: of what attention and the MLP read and, post, of what they write. residual_norm: of the residual stream itself,
    where the layer begins. is_fused: attention reads the embedding of a row's token, under embedding_norm, and behind it the
    hidden state: qkv is [.., 2 * hidden]. qkv, out: None for an MLP without attention. q_norm, k_norm: [D] or [heads, D] float32, or
    None. mlps: one, or an expert each; router: [experts, hidden] of a mixture. sinks: [heads] float32. window: how many keys
    a query sees; 0: all. rotary_table: which one; -1: no rotation. cross_query, cross_out: of attention to a source, which reads what
    cross_norm gives; None: the layer has none. bias: [heads, 2 * farthest + 1] float32 of its attention, see AttentionShape."""

    attention_norm: NormWeights
    mlp_norm: NormWeights
    attention_post_norm: NormWeights
    mlp_post_norm: NormWeights
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedMatrix | None
    out: PackedMatrix | None
    mlps: Sequence[StackMlp]
    router: PackedMatrix | None = None
    sinks: Tensor | None = None
    window: int = 0
    rotary_table: int = 0
    residual_norm: NormWeights = NO_NORM
    embedding_norm: NormWeights = NO_NORM
    is_fused: bool = False
    cross_norm: NormWeights = NO_NORM
    cross_query: PackedMatrix | None = None
    cross_out: PackedMatrix | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackForm:
    """What a decoder computes beside its products, as numbers. The residual stream is multiplied by embedding_scale where it
    begins; what a part adds to it, by residual_scale; logits, by logit_scale, before their soft cap. softcap: of attention's
    scores. Soft caps of 0: none. joint_head_norm: query norms are taken over all heads at once. norms_residual: the norm before a part of
    a layer is of the residual stream itself. sees_all: a row sees its whole span (an encoder)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    epsilon: float
    scale: float
    norm_kind: int = RMS_NORM
    is_parallel: bool = False
    norms_residual: bool = False
    sees_all: bool = False
    is_gated: bool = True
    activation: int = SILU
    joint_head_norm: bool = False
    experts_per_token: int = 0
    normalizes_experts: bool = False
    softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0


class StatefulRows(NamedTuple):
    """Of a decoder whose rows have a state beside their token: a head. fusion: [hidden, 2 * hidden], of a row's embedding and,
    behind it, its state, gives the hidden state that it begins with; None: it begins with the state. tap: of what a generated
    row hands to the next one as its state (see model.Body). column_ids: [D] int64, the id of each column of the logits, of
    num_ids; None: columns are ids."""

    tap: int
    num_ids: int
    column_ids: Tensor | None = None
    fusion: PackedMatrix | None = None


class Stack:
    """A whole decoder, or an encoder. embedding: [V, hidden] bfloat16, or packed. stateful: None for a language model. position_rows:
    [positions, hidden] float32, added to the embeddings; None: positions are in attention."""

    def __init__(
        self,
        layers: Sequence[StackLayer],
        embedding: Tensor | PackedMatrix,
        final_norm: NormWeights,
        head: PackedMatrix,
        form: StackForm,
        stateful: StatefulRows | None = None,
        position_rows: Tensor | None = None,
    ) -> None:
        self.num_layers, self.vocab_size = len(layers), head.out_features
        self.num_kv_heads, self.head_dim = form.num_kv_heads, form.head_dim
        self.num_embeddings, self.hidden_size = embedding.shape
        self.form = form
        self._num_experts_read = c_int64()
        structs = (LayerStruct * len(layers))(*(_layer_struct(layer) for layer in layers))
        self.is_stateful = stateful is not None
        stateful = stateful or StatefulRows(0, head.out_features)
        self.num_ids = stateful.num_ids
        self.attends_to_sources = any(layer.cross_query is not None for layer in layers)
        self.num_positions = None if position_rows is None else len(position_rows)
        self.keeps = (layers, structs, embedding, final_norm, head, stateful, position_rows)
        self.struct = StackStruct(
            layers=structs,
            embedding=None if isinstance(embedding, PackedMatrix) else embedding.data_ptr(),
            packed_embedding=embedding.struct if isinstance(embedding, PackedMatrix) else MatrixStruct(),
            position_rows=address(position_rows),
            fusion=_matrix_struct(stateful.fusion),
            final_norm=_norm_struct(final_norm),
            head=head.struct,
            column_ids=address(stateful.column_ids),
            state_tap=stateful.tap,
            num_ids=stateful.num_ids,
            num_experts_read=pointer(self._num_experts_read),
            num_layers=len(layers),
            hidden=self.hidden_size,
            intermediate=max(mlp.down.in_features for layer in layers for mlp in layer.mlps),
            head_norm_stride=_head_norm_stride(layers),
            farthest=max(0 if layer.bias is None else layer.bias.shape[1] // 2 for layer in layers),
            num_experts=max(len(layer.mlps) if layer.router is not None else 0 for layer in layers),
            **asdict(form),
        )

    def first_layers(
        self, num_layers: int, behind: Sequence[StackLayer] = (), final_norm: NormWeights | None = None
    ) -> Stack:
        """A decoder of the first layers alone, over the same matrices. behind: layers to run after them, which must have no
        attention. final_norm: None takes this decoder's."""
        layers, _, embedding, norm, head, _, position_rows = self.keeps
        norm = norm if final_norm is None else final_norm
        return Stack([*layers[:num_layers], *behind], embedding, norm, head, self.form, position_rows=position_rows)

    @property
    def num_experts_read(self) -> int:
        """How often an expert's weights were read, over all layers of all passes."""
        return self._num_experts_read.value


def _layer_struct(layer: StackLayer) -> LayerStruct:
    norms = (
        layer.attention_norm,
        layer.mlp_norm,
        layer.attention_post_norm,
        layer.mlp_post_norm,
        layer.residual_norm,
        layer.embedding_norm,
    )
    return LayerStruct(
        *map(_norm_struct, norms),
        *map(address, (layer.q_norm, layer.k_norm)),
        *map(_matrix_struct, (layer.qkv, layer.out)),
        (MlpStruct * len(layer.mlps))(*(MlpStruct(mlp.up.struct, mlp.down.struct) for mlp in layer.mlps)),
        _matrix_struct(layer.router),
        address(layer.sinks),
        _norm_struct(layer.cross_norm),
        *map(_matrix_struct, (layer.cross_query, layer.cross_out)),
        address(layer.bias),
        layer.is_fused,
        layer.router is not None,
        layer.window,
        layer.rotary_table,
    )


def _matrix_struct(matrix: PackedMatrix | None) -> MatrixStruct:
    return MatrixStruct() if matrix is None else matrix.struct


def _norm_struct(norm: NormWeights) -> NormStruct:
    return NormStruct(address(norm.weight), address(norm.bias))


def _head_norm_stride(layers: Sequence[StackLayer]) -> int:
    """0: all heads share a weight."""
    norm = layers[0].q_norm
    return 0 if norm is None or norm.dim() == 1 else norm.shape[1]


def batch_struct(
    stack: Stack,
    batch: StackBatch,
    rotation: tuple[Tensor, Tensor],
    logits: Tensor,
    taps: Sequence[int] = (),
    features: Tensor | None = None,
    states: Tensor | None = None,
) -> tuple[BatchStruct, tuple[object, ...]]:
    """The struct, and the memory it points to. rotation: cos and sin, [tables, positions, rotary_dim / 2] float32. features:
    [R, len(taps) * hidden] bfloat16, where the tapped hidden states go. states: [R, hidden] bfloat16, for a stateful decoder. Raises ValueError for ids, rows, slots and taps that are
    not there: past this point nothing is checked."""
    _check_batch(stack, batch, taps)
    _check_states(stack, batch, states)
    spans, (cos, sin) = batch.spans, rotation
    # Python's arrays: for a few numbers they cost a fifth of NumPy's
    ids, positions, wanted = (array("i", values) for values in (batch.ids, batch.positions, batch.wanted))
    slots = None if batch.slots is None else array("i", batch.slots)
    bounds = array("q", [x for span in spans for x in _bounds(span)])
    paths, path_stride = _path_table(batch)
    stores = _one_behind_the_other([span.stores for span in spans])
    sources = _one_behind_the_other([span.source.stores for span in spans if span.source is not None])
    arrays = (ids, positions, wanted, bounds, stores)
    at_ids, at_positions, at_wanted, at_bounds, at_stores = (each.buffer_info()[0] for each in arrays)
    tapped = array("q", taps)
    struct = BatchStruct(
        at_ids,
        at_positions,
        *(None if each is None else each.buffer_info()[0] for each in (slots, paths)),
        at_wanted,
        address(states),
        cos.data_ptr(),
        sin.data_ptr(),
        at_bounds,
        at_stores,
        sources.buffer_info()[0] if sources else None,
        logits.data_ptr(),
        len(ids),
        len(wanted),
        len(spans),
        cos.stride(0),
        path_stride,
        tapped.buffer_info()[0],
        address(features),
        len(tapped),
    )
    return struct, (*arrays, slots, paths, sources, tapped)


def _bounds(span: CacheSpan) -> tuple[int, ...]:
    """Span in structs.h."""
    length = 0 if span.source is None else span.source.length
    return span.first_row, span.num_rows, span.start, span.capacity, span.paths is not None, length, length


def _one_behind_the_other(arrays: Sequence[array[int]]) -> array[int]:
    return arrays[0] if len(arrays) == 1 else array("q", chain.from_iterable(arrays))


def _path_table(batch: StackBatch) -> tuple[array[int] | None, int]:
    """[R, stride], of all rows; rows of chains have none. -> None without trees"""
    stride = max((len(path) for span in batch.spans for path in span.paths or ()), default=0)
    if not stride:
        return None, 0
    table = array("i", bytes(array("i").itemsize * stride * len(batch.ids)))
    for span in batch.spans:
        for row, path in enumerate(span.paths or (), start=span.first_row):
            table[row * stride : row * stride + len(path)] = array("i", path)
    return table, stride


def _check_batch(stack: Stack, batch: StackBatch, taps: Sequence[int]) -> None:
    if any(not -1 <= tap <= stack.num_layers for tap in taps):
        raise ValueError(f"taps go from -1 to {stack.num_layers}: {list(taps)} are given")
    lowest, highest = min(batch.ids), max(batch.ids)
    if not 0 <= lowest <= highest < stack.num_embeddings:
        raise ValueError(f"token ids go from 0 to {stack.num_embeddings - 1}: {lowest} to {highest} are there")
    if batch.wanted and not 0 <= min(batch.wanted) <= max(batch.wanted) < len(batch.ids):
        raise ValueError(f"rows go from 0 to {len(batch.ids) - 1}: {batch.wanted} are wanted")
    if stack.num_positions is not None and not max(batch.positions) < stack.num_positions:
        raise ValueError(f"positions go from 0 to {stack.num_positions - 1}: {max(batch.positions)} is there")
    if any((span.source is not None) != stack.attends_to_sources for span in batch.spans):
        raise ValueError("sources go with the spans of a decoder that attends to them, and of no other")
    if batch.slots is None:
        return
    for span in batch.spans:
        slots = batch.slots[span.first_row : span.first_row + span.num_rows]
        if not span.start <= min(slots) <= max(slots) < span.capacity:
            raise ValueError(f"new slots go from {span.start} to {span.capacity - 1}: {slots} are given")
        if span.paths is not None:
            _check_paths(span, batch.positions[span.first_row : span.first_row + span.num_rows], slots)


def _check_paths(span: CacheSpan, positions: Sequence[int], slots: Sequence[int]) -> None:
    assert span.paths is not None
    lens = [position - span.start + 1 for position in positions]
    if [len(path) for path in span.paths] != lens or any(
        path[-1] != slot for path, slot in zip(span.paths, slots, strict=True)
    ):
        raise ValueError(
            "a path has a slot for each position from its span's start to its row's own, which is the last"
        )
    if any(not span.start <= slot < span.capacity for path in span.paths for slot in path):
        raise ValueError(f"paths have slots from {span.start} to {span.capacity - 1}")


def _check_states(stack: Stack, batch: StackBatch, states: Tensor | None) -> None:
    if (states is not None) != stack.is_stateful:
        raise ValueError("states go with the rows of a stateful decoder, and of no other")
    if states is None:
        return
    shape = (len(batch.ids), stack.hidden_size)
    if states.shape != shape or states.dtype != torch.bfloat16 or not states.is_contiguous():
        raise ValueError(f"states must be {shape} bfloat16 and contiguous, not {tuple(states.shape)} {states.dtype}")


def attention_struct(span: AttentionSpan, query: Tensor, shape: AttentionShape, out: Tensor) -> AttentionCallStruct:
    rows, start, keys, values, mask, num_seen = span
    return AttentionCallStruct(
        query.data_ptr() + rows.start * query.stride(1) * query.element_size(),
        query.stride(0),
        query.stride(1),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) // keys.shape[2],
        None,
        None,
        address(mask),
        0 if mask is None else mask.shape[1],
        address(shape.sinks),
        address(shape.bias),
        0 if shape.bias is None else shape.bias.shape[1] // 2,
        num_seen,
        out[rows].data_ptr(),
        0,
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
