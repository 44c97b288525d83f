"""Attention and whole decoders, as the compiled library reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from foredraft.kernels.structs import AttentionCallStruct, BatchStruct, LayerStruct, StackStruct
from foredraft.kernels.weights import PackedMatrix, address


class AttentionShape(NamedTuple):
    """What a layer's attention does with its scores. window: how many keys a query sees, its own included; 0: all.
    softcap: 0 for none. sinks: [Hq] float32, or None."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class CacheSpan(NamedTuple):
    """Rows first_row .. of a pass belong to one sequence. start: its positions that are in the cache already, at the slots of the
    same numbers. capacity: its slots. stores: [layers * 2], the addresses of the keys [H, capacity, D] and values of each layer."""

    first_row: int
    num_rows: int
    start: int
    capacity: int
    stores: array[int]


class StackBatch(NamedTuple):
    """A ragged batch whose spans are addresses of memory. ids, positions: [R]. slots: [R], or None where they equal positions.
    wanted: the rows whose logits are computed. See model.RaggedBatch."""

    ids: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int] | None
    wanted: Sequence[int]
    spans: Sequence[CacheSpan]


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


def batch_struct(
    stack: Stack, batch: StackBatch, rotation: tuple[Tensor, Tensor], logits: Tensor
) -> tuple[BatchStruct, tuple[object, ...]]:
    """The struct, and the memory it points to. rotation: cos and sin, [positions, D / 2] float32. Raises ValueError for ids, rows and
    slots that are not there: past this point nothing is checked."""
    _check_batch(stack, batch)
    spans, (cos, sin) = batch.spans, rotation
    # Python's arrays: for a few numbers they cost a fifth of NumPy's
    ids, positions, wanted = (array("i", values) for values in (batch.ids, batch.positions, batch.wanted))
    slots = None if batch.slots is None else array("i", batch.slots)
    bounds = array("q", [x for s in spans for x in (s.first_row, s.num_rows, s.start, s.capacity)])
    stores = spans[0].stores if len(spans) == 1 else array("q", chain.from_iterable(span.stores for span in spans))
    arrays = (ids, positions, wanted, bounds, stores)
    at_ids, at_positions, at_wanted, at_bounds, at_stores = (each.buffer_info()[0] for each in arrays)
    struct = BatchStruct(
        at_ids,
        at_positions,
        None if slots is None else slots.buffer_info()[0],
        at_wanted,
        cos.data_ptr(),
        sin.data_ptr(),
        at_bounds,
        at_stores,
        logits.data_ptr(),
        len(ids),
        len(wanted),
        len(spans),
    )
    return struct, (*arrays, slots)


def _check_batch(stack: Stack, batch: StackBatch) -> None:
    lowest, highest = min(batch.ids), max(batch.ids)
    if not 0 <= lowest <= highest < stack.num_embeddings:
        raise ValueError(f"token ids go from 0 to {stack.num_embeddings - 1}: {lowest} to {highest} are there")
    if batch.wanted and not 0 <= min(batch.wanted) <= max(batch.wanted) < len(batch.ids):
        raise ValueError(f"rows go from 0 to {len(batch.ids) - 1}: {batch.wanted} are wanted")
    if batch.slots is None:
        return
    for span in batch.spans:
        slots = batch.slots[span.first_row : span.first_row + span.num_rows]
        if not span.start <= min(slots) <= max(slots) < span.capacity:
            raise ValueError(f"new slots go from {span.start} to {span.capacity - 1}: {slots} are given")


def attention_struct(
    span: tuple[slice, int, Tensor, Tensor, Tensor | None], query: Tensor, shape: AttentionShape, out: Tensor
) -> AttentionCallStruct:
    rows, start, keys, values, mask = span
    return AttentionCallStruct(
        query.data_ptr() + rows.start * query.stride(1) * query.element_size(),
        query.stride(0),
        query.stride(1),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0) // keys.shape[2],
        None,
        address(mask),
        0 if mask is None else mask.shape[1],
        address(shape.sinks),
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
