"""What a decoder of Llama's form computes between its matrix products, in Triton: a program a row (and a head).

A program sums over its own row in an order that its position alone decides, so a row's bits depend neither on how many
rows share the launch nor on where among them it stands; `linear` says the same of products. Keys and values are read and
written where the cache keeps them: the kernels are given addresses, so a captured graph finds a sequence that has moved.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1), which is how they are tested.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.gpu.inputs import Inputs
from foredraft.gpu.weights import DeviceLayer, Linear, Shape

_KEY_BLOCK = 64
_GATE_BLOCK = 1024
_ROWS, _COLUMNS, _INNER = 16, 32, 128
"""Of a block of `linear`: rows of the pass, of the matrix, and how much of the inner size at a time."""


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """residual += delta; then RMS norm (arXiv:1910.07467). residual, delta: [T, N] -> [T, N]"""
    num_rows, width = residual.shape
    out = torch.empty_like(residual)
    given = residual if delta is None else delta
    _add_norm[(num_rows,)](
        given, residual, weight, out, width, epsilon, HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width)
    )
    return out


def rotate_and_store(qkv: Tensor, inputs: Inputs, index: int, layer: DeviceLayer, shape: Shape) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) of queries and keys, normed before where the layer does that; keys and values go
    to their places in the cache. qkv: [T, (Hq + 2 Hkv) * D] -> queries [T, Hq, D]"""
    num_rows = qkv.shape[0]
    queries = qkv.new_empty(num_rows, shape.num_heads, shape.head_dim)
    _rotate_and_store[(num_rows, shape.num_heads + 2 * shape.num_kv_heads)](
        qkv,
        queries,
        inputs.positions,
        inputs.row_spans,
        inputs.stores[index],
        inputs.capacities,
        shape.cos,
        shape.sin,
        qkv if layer.q_norm is None else layer.q_norm,
        qkv if layer.k_norm is None else layer.k_norm,
        shape.cos.shape[0],
        shape.epsilon,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HALF=shape.head_dim // 2,
        HAS_NORM=layer.q_norm is not None,
        BLOCK=triton.next_power_of_2(shape.head_dim // 2),
    )
    return queries


def attend(queries: Tensor, inputs: Inputs, index: int, layer: DeviceLayer, shape: Shape) -> Tensor:
    """Causal attention of each row over the keys of its own sequence. queries: [T, Hq, D] -> [T, Hq * D]

    The softmax is summed up as it goes (arXiv:2205.14135), block after block of keys at fixed places: keys are not dealt
    out to several programs, whose number would then decide the order of the sum.
    """
    num_rows = queries.shape[0]
    groups = shape.num_heads // shape.num_kv_heads
    out = torch.zeros_like(queries)  # rows of no sequence stay zero
    _attend[(num_rows, shape.num_kv_heads)](
        queries,
        out,
        inputs.positions,
        inputs.row_spans,
        inputs.stores[index],
        inputs.capacities,
        shape.scale,
        layer.window,
        GROUPS=groups,
        KV_HEADS=shape.num_kv_heads,
        WIDTH=shape.head_dim,
        BLOCK_G=max(16, triton.next_power_of_2(groups)),
        BLOCK_D=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_N=_KEY_BLOCK,
    )
    return out.view(num_rows, -1)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. [T, 2 * I] -> [T, I]"""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _gated[(num_rows, triton.cdiv(width, _GATE_BLOCK))](gate_up, out, width, BLOCK=_GATE_BLOCK)
    return out


def linear(x: Tensor, matrix: Linear) -> Tensor:
    """A product whose rows do not see each other: the inner size is never split, and walked in one order whatever the
    number of rows. x: [T, k] -> [T, n]"""
    num_rows, inner = x.shape
    n = matrix.weight.shape[0]
    out = x.new_empty(num_rows, n)
    _linear[(triton.cdiv(num_rows, _ROWS), triton.cdiv(n, _COLUMNS))](
        x,
        matrix.weight,
        x if matrix.bias is None else matrix.bias,
        out,
        num_rows,
        n,
        inner,
        HAS_BIAS=matrix.bias is not None,
        BLOCK_M=_ROWS,
        BLOCK_N=_COLUMNS,
        BLOCK_K=_INNER,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(
    delta: Any,
    residual: Any,
    weight: Any,
    out: Any,
    width: Any,
    epsilon: Any,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width
    places = tl.arange(0, BLOCK)
    inside = places < width
    element = residual.dtype.element_ty
    x = tl.load(residual + row + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row + places, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(element)
        tl.store(residual + row + places, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / width
    normed = (x * (1.0 / tl.sqrt(mean + epsilon))).to(element).to(tl.float32)
    scaled = normed * tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + places, scaled.to(element), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(
    qkv: Any,
    queries: Any,
    positions: Any,
    row_spans: Any,
    stores: Any,
    capacities: Any,
    cos: Any,
    sin: Any,
    q_norm: Any,
    k_norm: Any,
    num_positions: Any,
    epsilon: Any,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    places = tl.arange(0, BLOCK)
    inside = places < HALF
    element = qkv.dtype.element_ty
    source = qkv + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    low = tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + places, mask=inside, other=0.0).to(tl.float32)
    position = tl.load(positions + row)
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            norm = q_norm
            if head >= HEADS:
                norm = k_norm
            mean = (tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / (2 * HALF)
            inverse = 1.0 / tl.sqrt(mean + epsilon)
            low_weight = tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
            high_weight = tl.load(norm + HALF + places, mask=inside, other=0.0).to(tl.float32)
            low = ((low * inverse).to(element).to(tl.float32) * low_weight).to(element).to(tl.float32)
            high = ((high * inverse).to(element).to(tl.float32) * high_weight).to(element).to(tl.float32)
        angle = tl.minimum(position, num_positions - 1) * HALF
        c = tl.load(cos + angle + places, mask=inside, other=0.0)
        s = tl.load(sin + angle + places, mask=inside, other=0.0)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if head < HEADS:
        goal = queries + (row.to(tl.int64) * HEADS + head) * (2 * HALF)
        tl.store(goal + places, low.to(element), mask=inside)
        tl.store(goal + HALF + places, high.to(element), mask=inside)
    else:
        span = tl.load(row_spans + row)
        if span >= 0:
            capacity = tl.load(capacities + span)
            if position < capacity:
                is_value = (head - HEADS) // KV_HEADS
                store = tl.load(stores + span * 2 + is_value).to(tl.pointer_type(element))
                goal = store + (((head - HEADS) % KV_HEADS) * capacity + position) * (2 * HALF)
                tl.store(goal + places, low.to(element), mask=inside)
                tl.store(goal + HALF + places, high.to(element), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: Any,
    out: Any,
    positions: Any,
    row_spans: Any,
    stores: Any,
    capacities: Any,
    scale: Any,
    window: Any,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    row, head = tl.program_id(0), tl.program_id(1)
    span = tl.load(row_spans + row)
    if span >= 0:
        element = queries.dtype.element_ty
        capacity = tl.load(capacities + span)
        keys = tl.load(stores + span * 2).to(tl.pointer_type(element)) + head * capacity * WIDTH
        values = tl.load(stores + span * 2 + 1).to(tl.pointer_type(element)) + head * capacity * WIDTH
        # what goes on past its room, behind a shorter draft, is of no consequence, and must not read on either
        end = tl.minimum(tl.load(positions + row) + 1, capacity)
        start = end * 0
        if window > 0:
            start = tl.maximum(end - window, 0)
        group, wide = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        own = (row.to(tl.int64) * KV_HEADS + head) * GROUPS + group
        own_mask = (group[:, None] < GROUPS) & (wide[None, :] < WIDTH)
        query = tl.load(queries + own[:, None] * WIDTH + wide[None, :], mask=own_mask, other=0.0)
        best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        read = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for first in range(start // BLOCK_N * BLOCK_N, end, BLOCK_N):
            place = first + tl.arange(0, BLOCK_N)
            seen = (place >= start) & (place < end)
            mask = seen[:, None] & (wide[None, :] < WIDTH)
            key = tl.load(keys + place[:, None] * WIDTH + wide[None, :], mask=mask, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            shrunk = tl.exp(best - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * shrunk + tl.sum(weights, axis=1)
            value = tl.load(values + place[:, None] * WIDTH + wide[None, :], mask=mask, other=0.0)
            read = read * shrunk[:, None] + tl.dot(weights.to(element), value, input_precision="ieee")
            best = higher
        tl.store(out + own[:, None] * WIDTH + wide[None, :], (read / total[:, None]).to(element), mask=own_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(gate_up: Any, out: Any, width: Any, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    element = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + places, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out + row * width + places, (activated * up).to(element), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _linear(
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    num_rows: Any,
    num_columns: Any,
    inner: Any,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        k = first + steps
        some = tl.load(
            x + rows[:, None] * inner + k[None, :],
            mask=(rows[:, None] < num_rows) & (k[None, :] < inner),
            other=0.0,
        )
        matrix = tl.load(
            weight + columns[:, None] * inner + k[None, :],
            mask=(columns[:, None] < num_columns) & (k[None, :] < inner),
            other=0.0,
        )
        total += tl.dot(some, tl.trans(matrix), input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    goal = out + rows[:, None] * num_columns + columns[None, :]
    tl.store(
        goal,
        total.to(out.dtype.element_ty),
        mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns),
    )
