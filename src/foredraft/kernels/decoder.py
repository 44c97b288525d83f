"""Attention and whole decoders, in the form that the compiled library reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int64, pointer
from dataclasses import asdict, dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from foredraft.kernels.specs import columns_of
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
    softcap: 0 for none. sinks: [Hq] float32, or None. bias: [Hq, 2 * farthest + 1] float32, or None: added to scores by the distance
    key - query, clamped to -farthest .. farthest."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    bias: Tensor | None = None


class AttentionSpan(NamedTuple):
    """Rows of a call that belong to one sequence. start: the position of the first row. keys: [H, N, Dk], values: [H, N, Dv], views of
    buffers that may have more slots. Keys are read sixteen at a time: N must be a multiple of 16, or readable memory must follow.
    mask: [R, N] bool, False hides a key; None hides none. num_seen: how many keys every row may see; 0: each row sees those up to
    its own position."""

    rows: slice
    start: int
    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    num_seen: int = 0

    @property
    def num_keys(self) -> int:
        """The most keys that any of its rows may see."""
        return self.num_seen or self.start + self.rows.stop - self.rows.start


class SourceSpan(NamedTuple):
    """length: of a source. stores: [layers * 2], the addresses of its keys [H, length, D] and values for each layer of a decoder;
    readable memory must follow the keys, see AttentionSpan."""

    length: int
    stores: array[int]


class CacheSpan(NamedTuple):
    """The num_rows rows from first_row on that belong to one sequence. start: how many of its positions are already in the cache, each
    in the slot of the same number. capacity: its number of slots. stores: [layers * 2], the addresses of the keys [H, capacity, D] and
    values of each layer. paths: for each row the slots of the positions from start to its own, whose keys it sees in addition to those
    before start; None: the rows are a chain, each in the slot of its position. source: what the rows of an encoder-decoder also attend
    to. features: the address of the tapped hidden states [capacity, F] bfloat16 of all slots, which the pass writes; None: it returns
    those of its rows."""

    first_row: int
    num_rows: int
    start: int
    capacity: int
    stores: array[int]
    paths: Sequence[Sequence[int]] | None = None
    source: SourceSpan | None = None
    features: int | None = None


States: TypeAlias = Tensor | Sequence[Tensor]
"""Of the rows of a stateful decoder: [R, hidden] bfloat16, or instead the target's features, [R', F] bfloat16 for each span."""


class StackBatch(NamedTuple):
    """A ragged batch whose spans hold memory addresses. ids, positions: [R]. slots: [R], or None if they equal positions.
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
    """weight, bias: [width] float32. weight None: no norm. bias: for layer norms only."""

    weight: Tensor | None = None
    bias: Tensor | None = None


class StackMlp(NamedTuple):
    """up: [intermediate, hidden], or gate and up interleaved. down: [hidden, intermediate]."""

    up: PackedMatrix
    down: PackedMatrix


NO_NORM = NormWeights()


@dataclass(frozen=True, slots=True)
class StackLayer:
    """attention_norm, mlp_norm: of the inputs of attention and the MLP; the post norms are of their outputs. residual_norm: replaces the
    residual stream by its norm at the start of the layer. is_fused: attention reads the embedding of a row's token, after
    embedding_norm, concatenated with the hidden state, so qkv is [.., 2 * hidden]. qkv, out: None for an MLP without attention.
    q_norm, k_norm: [D] or [heads, D] float32, or None. mlps: one, or one for each expert; router: [experts, hidden], for a mixture of
    experts. sinks: [heads] float32. window: how many keys a query sees; 0: all. rotary_table: its index; -1: no rotation. cross_query,
    cross_out: of cross-attention to a source, whose input is normed by cross_norm; None: the layer has none. bias:
    [heads, 2 * farthest + 1] float32 of its attention, see AttentionShape."""

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
    """The settings of a decoder, apart from its matrices. embedding_scale multiplies the embeddings, residual_scale the outputs that
    attention and MLPs add to the residual stream, logit_scale the logits, before their soft cap. softcap: of attention scores. A soft cap
    of 0 is none. joint_head_norm: query and key norms are taken over all heads at once. norms_residual: the norms before attention and
    the MLP replace the residual stream too. sees_all: a row sees its whole span (an encoder)."""

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


class FeatureFusion(NamedTuple):
    """How the target's features become a head's states: RMS norms, then a product (EAGLE-3, arXiv:2503.01840). fc: [hidden, F]. norm: [F]
    float32, the weights of the norms of num_parts equal parts; None: no norm."""

    fc: PackedMatrix
    norm: Tensor | None = None
    num_parts: int = 1


class StatefulRows(NamedTuple):
    """For a decoder whose rows have a state as well as a token: a head. fusion: [hidden, 2 * hidden], maps the concatenation of a row's
    embedding and its state to the initial hidden state; None: that is the state. tap: of the hidden state that a generated row passes
    to the next one as its state (see model.Body). num_ids: the size of the vocabulary. column_ids: [D] int64, the id of each column of
    the logits; None: columns are ids. features: how a row's features become its state; None: they are the state."""

    tap: int
    num_ids: int
    column_ids: Tensor | None = None
    fusion: PackedMatrix | None = None
    features: FeatureFusion | None = None


class Stack:
    """A whole decoder, or an encoder. embedding: [V, hidden] bfloat16, or packed. stateful: None for a language model. position_rows:
    [positions, hidden] float32, added to the embeddings; None: only attention depends on positions."""

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
        self.num_ids, self.column_ids = stateful.num_ids, stateful.column_ids
        self.columns = columns_of(self.column_ids, self.num_ids)
        features = stateful.features
        self.features_width = self.hidden_size if features is None else features.fc.in_features
        self.attends_to_sources = any(layer.cross_query is not None for layer in layers)
        self.num_positions = None if position_rows is None else len(position_rows)
        self.keeps = (layers, structs, embedding, final_norm, head, stateful, position_rows)
        self.struct = StackStruct(
            layers=structs,
            embedding=None if isinstance(embedding, PackedMatrix) else embedding.data_ptr(),
            packed_embedding=embedding.struct if isinstance(embedding, PackedMatrix) else MatrixStruct(),
            position_rows=address(position_rows),
            fusion=_matrix_struct(stateful.fusion),
            features_fc=_matrix_struct(None if features is None else features.fc),
            features_norm=None if features is None else address(features.norm),
            features_parts=1 if features is None else features.num_parts,
            features_width=self.features_width,
            final_norm=_norm_struct(final_norm),
            head=head.struct,
            column_ids=address(stateful.column_ids),
            state_tap=stateful.tap,
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
        """A decoder of the first layers alone, which shares their matrices. behind: layers to run after them, which must have no
        attention. final_norm: None takes this decoder's."""
        layers, _, embedding, norm, head, _, position_rows = self.keeps
        norm = norm if final_norm is None else final_norm
        return Stack([*layers[:num_layers], *behind], embedding, norm, head, self.form, position_rows=position_rows)

    @property
    def num_experts_read(self) -> int:
        """How often the weights of an expert were read, over all layers of all passes."""
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
    """The distance from one head's norm weight to the next; 0: all heads share one."""
    norm = layers[0].q_norm
    return 0 if norm is None or norm.dim() == 1 else norm.shape[1]


def batch_struct(
    stack: Stack,
    batch: StackBatch,
    rotation: tuple[Tensor, Tensor],
    logits: Tensor,
    taps: Sequence[int] = (),
    features: Tensor | None = None,
    states: States | None = None,
) -> tuple[BatchStruct, tuple[object, ...]]:
    """The struct, and the memory it points to. rotation: cos and sin, [tables, positions, rotary_dim / 2] float32. features:
    [R, len(taps) * hidden] bfloat16, the output buffer of the tapped hidden states; None: they go where the spans say. states: for a
    stateful decoder. Raises ValueError for ids, rows, slots and taps that are out of range: nothing is checked after this."""
    _check_batch(stack, batch, taps)
    _check_states(stack, batch, states)
    spans, (cos, sin) = batch.spans, rotation
    # for a few numbers, Python's arrays cost a fifth of NumPy's
    ids, positions, wanted = array("i", batch.ids), array("i", batch.positions), array("i", batch.wanted)
    slots = None if batch.slots is None else array("i", batch.slots)
    bounds = array("q", [x for span in spans for x in _bounds(span)])
    paths, path_stride = _path_table(batch)
    stores = _one_behind_the_other([span.stores for span in spans])
    sources = _one_behind_the_other([span.source.stores for span in spans if span.source is not None])
    tapped = array("q", taps)
    kept = _kept_rows(stack, batch, taps, features)
    given, read = (states, None) if isinstance(states, Tensor) else (None, feature_rows(states or ()))
    arrays = (ids, positions, slots, paths, wanted, read, bounds, stores, sources, tapped, kept)
    struct = BatchStruct(
        *[numbers.buffer_info()[0] if numbers else None for numbers in arrays],
        address(given),
        cos.data_ptr(),
        sin.data_ptr(),
        logits.data_ptr(),
        len(ids),
        len(wanted),
        len(spans),
        cos.stride(0),
        path_stride,
        len(tapped),
    )
    return struct, arrays


def _kept_rows(stack: Stack, batch: StackBatch, taps: Sequence[int], features: Tensor | None) -> array[int] | None:
    """The address for each row's tapped hidden states; None without taps."""
    if not taps:
        return None
    if features is not None:
        return feature_rows([features])
    row_bytes = len(taps) * stack.hidden_size * torch.bfloat16.itemsize
    slots = batch.positions if batch.slots is None else batch.slots
    rows = array("q")
    for span in batch.spans:
        assert span.features is not None
        own = slots[span.first_row : span.first_row + span.num_rows]
        rows.extend([span.features + slot * row_bytes for slot in own])
    return rows


def feature_rows(parts: Sequence[Tensor]) -> array[int]:
    """The address of each row. parts: [R, F] each, with adjacent numbers in a row"""
    rows = array("q")
    for part in parts:
        start, step = part.data_ptr(), part.stride(0) * part.element_size()
        rows.extend([start + r * step for r in range(part.shape[0])])
    return rows


def _bounds(span: CacheSpan) -> tuple[int, ...]:
    """The fields of Span in structs.h."""
    length = 0 if span.source is None else span.source.length
    return span.first_row, span.num_rows, span.start, span.capacity, span.paths is not None, length, length


def _one_behind_the_other(arrays: Sequence[array[int]]) -> array[int]:
    return arrays[0] if len(arrays) == 1 else array("q", chain.from_iterable(arrays))


def _path_table(batch: StackBatch) -> tuple[array[int] | None, int]:
    """The paths of all rows, [R, stride], and the stride; rows of chains have none. None without trees."""
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
        raise ValueError(f"taps must be from -1 to {stack.num_layers}: got {list(taps)}")
    lowest, highest = min(batch.ids), max(batch.ids)
    if not 0 <= lowest <= highest < stack.num_embeddings:
        raise ValueError(f"token ids must be from 0 to {stack.num_embeddings - 1}: got {lowest} to {highest}")
    if batch.wanted and not 0 <= min(batch.wanted) <= max(batch.wanted) < len(batch.ids):
        raise ValueError(f"rows must be from 0 to {len(batch.ids) - 1}: got {batch.wanted}")
    if stack.num_positions is not None and not max(batch.positions) < stack.num_positions:
        raise ValueError(f"positions must be from 0 to {stack.num_positions - 1}: got {max(batch.positions)}")
    if any((span.source is not None) != stack.attends_to_sources for span in batch.spans):
        raise ValueError("spans must have sources if the decoder attends to sources, and must have none otherwise")
    if batch.slots is None:
        return
    for span in batch.spans:
        slots = batch.slots[span.first_row : span.first_row + span.num_rows]
        if not span.start <= min(slots) <= max(slots) < span.capacity:
            raise ValueError(f"new slots must be from {span.start} to {span.capacity - 1}: got {slots}")
        if span.paths is not None:
            _check_paths(span, batch.positions[span.first_row : span.first_row + span.num_rows], slots)


def _check_paths(span: CacheSpan, positions: Sequence[int], slots: Sequence[int]) -> None:
    assert span.paths is not None
    lens = [position - span.start + 1 for position in positions]
    if [len(path) for path in span.paths] != lens or any(
        path[-1] != slot for path, slot in zip(span.paths, slots, strict=True)
    ):
        raise ValueError(
            "a path must have a slot for each position from its span's start to its row's own, and end with the row's slot"
        )
    if any(not span.start <= slot < span.capacity for path in span.paths for slot in path):
        raise ValueError(f"slots of paths must be from {span.start} to {span.capacity - 1}")


def _check_states(stack: Stack, batch: StackBatch, states: States | None) -> None:
    if (states is not None) != stack.is_stateful:
        raise ValueError("rows must have states if the decoder is stateful, and must have none otherwise")
    if not isinstance(states, Tensor):
        if states is not None:
            check_features(stack, states, len(batch.ids))
        return
    shape = (len(batch.ids), stack.hidden_size)
    if states.shape != shape or states.dtype != torch.bfloat16 or not states.is_contiguous():
        raise ValueError(f"states must be {shape} bfloat16 and contiguous, not {tuple(states.shape)} {states.dtype}")


def check_features(stack: Stack, parts: Sequence[Tensor], num_rows: int) -> None:
    """Raises ValueError if these are not num_rows rows of a head's features."""
    width = stack.features_width
    if sum([part.shape[0] for part in parts]) != num_rows:
        raise ValueError(f"each of {num_rows} rows must have features")
    for part in parts:
        if part.shape[1] != width or part.dtype != torch.bfloat16 or part.stride(1) != 1:
            raise ValueError(
                f"features must be [R, {width}] bfloat16 with adjacent columns, not {[*part.shape]} {part.dtype}"
            )


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
