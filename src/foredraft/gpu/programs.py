"""The kernels as Triton compiles them; `kernels.py` and `rows.py` call them and document their arguments.

Only constants are annotated: Triton reads annotations, and knows no others.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embed(ids, chosen, embedding, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < width
    token = tl.load(ids + row)
    if token < 0:
        token = tl.maximum(tl.load(tl.load(chosen).to(tl.pointer_type(tl.int64)) - 1 - token), 0)
    numbers = tl.load(embedding + token * width + places, mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64) * width + places, numbers, mask=inside)


@triton.jit
def norm(x, weight, out, width, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    places = tl.arange(0, BLOCK)
    inside = places < width
    element = x.dtype.element_ty
    numbers = tl.load(x + row + places, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(numbers * numbers, axis=0) / width
    normed = (numbers * (1.0 / tl.sqrt(mean + epsilon))).to(element).to(tl.float32)
    scaled = normed * tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + places, scaled.to(element), mask=inside)


@triton.jit
def rotate_and_store(
    qkv,
    queries,
    positions,
    row_spans,
    stores,
    capacities,
    cos,
    sin,
    q_norm,
    k_norm,
    slots,
    num_positions,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
            slot = position
            if HAS_SLOTS:
                slot = tl.load(slots + row)
            if slot < capacity:
                is_value = (head - HEADS) // KV_HEADS
                store = tl.load(stores + span * 2 + is_value).to(tl.pointer_type(element))
                goal = store + (((head - HEADS) % KV_HEADS) * capacity + slot) * (2 * HALF)
                tl.store(goal + places, low.to(element), mask=inside)
                tl.store(goal + HALF + places, high.to(element), mask=inside)


@triton.jit
def attend(
    queries,
    out,
    reads,
    sums,
    positions,
    row_spans,
    stores,
    capacities,
    path_slots,
    starts,
    first_slots,
    scale,
    window,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    element = queries.dtype.element_ty
    group, wide = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    of_head = row.to(tl.int64) * KV_HEADS + head
    heads = of_head * GROUPS + group
    head_mask = (group[:, None] < GROUPS) & (wide[None, :] < WIDTH)
    span = tl.load(row_spans + row)
    if span < 0:
        if part == 0:
            nothing = tl.zeros((BLOCK_G, BLOCK_D), element)
            tl.store(out + heads[:, None] * WIDTH + wide[None, :], nothing, mask=head_mask)
    else:
        capacity = tl.load(capacities + span)
        # allocations are aligned; without this hint numbers would be loaded one by one
        keys = tl.multiple_of(tl.load(stores + span * 2).to(tl.pointer_type(element)), 16) + head * capacity * WIDTH
        values = (
            tl.multiple_of(tl.load(stores + span * 2 + 1).to(tl.pointer_type(element)), 16) + head * capacity * WIDTH
        )
        # a shorter draft of the batch generates past its capacity: the result is not used, but it must not read there
        end = tl.minimum(tl.load(positions + row) + 1, capacity)
        start = end * 0
        if window > 0:
            start = tl.maximum(end - window, 0)
        # whole blocks at fixed places: where a part begins depends on the row's own position alone
        first_block = start // BLOCK_N
        num_blocks = tl.cdiv(tl.cdiv(end, BLOCK_N) - first_block, PARTS)
        first_key = (first_block + part * num_blocks) * BLOCK_N
        query = tl.load(queries + heads[:, None] * WIDTH + wide[None, :], mask=head_mask, other=0.0)
        best = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_G,), tl.float32)
        read = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
        for first in range(first_key, tl.minimum(first_key + num_blocks * BLOCK_N, end), BLOCK_N):
            place = first + tl.arange(0, BLOCK_N)
            seen = (place >= start) & (place < end)
            mask = seen[:, None] & (wide[None, :] < WIDTH)
            slot = place
            if HAS_SLOTS:
                cached = tl.load(starts + span)
                new = path_slots + tl.load(first_slots + row) + place - cached
                slot = tl.load(new, mask=seen & (place >= cached), other=0)
                slot = tl.where(place < cached, place, slot)
            key = tl.load(keys + slot[:, None] * WIDTH + wide[None, :], mask=mask, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            shrunk = tl.exp(best - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * shrunk + tl.sum(weights, axis=1)
            value = tl.load(values + slot[:, None] * WIDTH + wide[None, :], mask=mask, other=0.0)
            read = read * shrunk[:, None] + tl.dot(weights.to(element), value, input_precision="ieee")
            best = higher
        if PARTS == 1:
            tl.store(out + heads[:, None] * WIDTH + wide[None, :], (read / total[:, None]).to(element), mask=head_mask)
        else:
            place = (of_head * PARTS + part) * GROUPS + group
            tl.store(reads + place[:, None] * WIDTH + wide[None, :], read, mask=head_mask)
            tl.store(sums + 2 * place, best, mask=group < GROUPS)
            tl.store(sums + 2 * place + 1, total, mask=group < GROUPS)


@triton.jit
def merge(
    reads,
    sums,
    out,
    row_spans,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(row_spans + row) >= 0:
        wide = tl.arange(0, BLOCK_D)
        inside = wide < WIDTH
        of_head = row.to(tl.int64) * KV_HEADS + head // GROUPS
        place = (of_head * PARTS + tl.arange(0, PARTS)) * GROUPS + head % GROUPS
        best = tl.load(sums + 2 * place)
        # the first part always has a key, so one of these is finite; a part without keys gets weight 0
        weights = tl.exp(best - tl.max(best, axis=0))
        total = tl.sum(weights * tl.load(sums + 2 * place + 1), axis=0)
        read = tl.load(reads + place[:, None] * WIDTH + wide[None, :], mask=inside[None, :], other=0.0)
        goal = out + (row.to(tl.int64) * KV_HEADS * GROUPS + head) * WIDTH
        whole = tl.sum(weights[:, None] * read, axis=0) / total
        tl.store(goal + wide, whole.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    element = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + places, mask=inside, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
    tl.store(out + row * width + places, (activated * up).to(element), mask=inside)


# the compiled code must not depend on num_rows, or a row's bits might
@triton.jit(do_not_specialize=["num_rows"])
def linear(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    inner,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    steps = tl.arange(0, BLOCK_K)
    element = out.dtype.element_ty
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        k = first + steps
        some = tl.load(
            x + rows[:, None] * inner + k[None, :],
            mask=(rows[:, None] < num_rows) & (k[None, :] < inner),
            other=0.0,
        )
        places = weight + columns[:, None] * inner + k[None, :]
        mask = (columns[:, None] < num_columns) & (k[None, :] < inner)
        total += tl.dot(some, tl.trans(tl.load(places, mask=mask, other=0.0)), input_precision="ieee")
        if IS_GATED:
            below = weight + (columns + num_columns)[:, None] * inner + k[None, :]
            others = tl.load(below, mask=mask, other=0.0)
            other_total += tl.dot(some, tl.trans(others), input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        gate = total.to(element).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        total = activated * other_total.to(element).to(tl.float32)
    goal = out + rows[:, None] * num_columns + columns[None, :]
    mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    if ADDS:
        total += tl.load(goal, mask=mask, other=0.0).to(tl.float32)
    tl.store(goal, total.to(element), mask=mask)


# rows come in many numbers, and none of them is worth waiting for a compiler
@triton.jit(do_not_specialize=["num_rows"])
def top_two(logits, out, parts, num_rows, stride, width, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < width, other=float("-inf"))
    numbers = numbers.to(tl.float32)
    largest = tl.max(numbers, axis=0)
    place = tl.min(tl.where(numbers == largest, columns, width), axis=0)
    second = tl.max(tl.where(columns == place, float("-inf"), numbers), axis=0)
    has_nan = tl.max((numbers != numbers).to(tl.int32), axis=0) > 0
    place = tl.where(has_nan, -1, place)
    if PARTS == 1:
        tl.store(out + row, place.to(tl.float64))
        tl.store(out + num_rows + row, largest.to(tl.float64) - second.to(tl.float64))
    else:
        goal = parts + (row * PARTS + part) * 3
        tl.store(goal, place.to(tl.float64))
        tl.store(goal + 1, largest.to(tl.float64))
        tl.store(goal + 2, second.to(tl.float64))


@triton.jit(do_not_specialize=["num_rows"])
def merge_top_two(parts, out, num_rows, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    at = parts + (row * num_parts + part) * 3
    places = tl.load(at, mask=inside, other=0.0)
    numbers = tl.load(at + 1, mask=inside, other=float("-inf"))
    seconds = tl.load(at + 2, mask=inside, other=float("-inf"))
    largest = tl.max(numbers, axis=0)
    first = tl.min(tl.where((numbers == largest) & inside, part, BLOCK), axis=0)
    place = tl.sum(tl.where(part == first, places, 0.0), axis=0)
    second = tl.max(tl.where(part == first, seconds, numbers), axis=0)
    has_nan = tl.max((inside & (places < 0)).to(tl.int32), axis=0) > 0
    tl.store(out + row, tl.where(has_nan, -1.0, place))
    tl.store(out + num_rows + row, largest - second)


@triton.jit
def begin(
    positions,
    wanted,
    capacities,
    stores,
    step_positions,
    step_capacities,
    step_stores,
    step_row_spans,
    num_spans,
    num_stores,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(step_stores + place, tl.load(stores + place, mask=place < num_stores, other=0), mask=place < num_stores)
    inside = place < num_spans
    last = tl.load(wanted + place, mask=inside, other=0)
    capacity = tl.load(capacities + place, mask=inside, other=0)
    tl.store(step_positions + place, tl.load(positions + last, mask=inside, other=0), mask=inside)
    tl.store(step_capacities + place, capacity, mask=inside)
    tl.store(step_row_spans + place, tl.where(capacity > 0, place, -1).to(tl.int64), mask=inside)


@triton.jit
def advance(chosen, ids, step_ids, step_positions, num_rows, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    new = tl.load(chosen + row, mask=inside, other=0).to(tl.int64)
    tl.store(ids + row, new, mask=inside)
    tl.store(step_ids + row, tl.maximum(new, 0), mask=inside)
    position = tl.load(step_positions + row, mask=inside, other=0)
    tl.store(step_positions + row, position + 1, mask=inside)
