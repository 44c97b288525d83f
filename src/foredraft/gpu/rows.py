"""Choosing tokens on the device, in Triton: the largest numbers of rows of logits, and the inputs of the pass that reads the chosen ids."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from foredraft.gpu import programs
from foredraft.gpu.inputs import Inputs

_BLOCK, _COPIED = 8192, 1024


def top_two(x: Tensor) -> Tensor:
    """x: [R, V], rows contiguous, of at most 32 bits -> [2, R] float64: the first index of each row's largest number, -1 if it has a NaN,
    and by how much that number exceeds the second largest, infinity if there is none."""
    num_rows, width = x.shape
    out = x.new_empty(2, num_rows, dtype=torch.float64)
    num_parts = triton.cdiv(width, _BLOCK)
    parts = out if num_parts == 1 else x.new_empty(num_rows, num_parts, 3, dtype=torch.float64)
    block = min(_BLOCK, triton.next_power_of_2(width))
    programs.top_two[(num_rows, num_parts)](x, out, parts, num_rows, x.stride(0), width, PARTS=num_parts, BLOCK=block)
    if num_parts > 1:
        programs.merge_top_two[(num_rows,)](parts, out, num_rows, num_parts, BLOCK=triton.next_power_of_2(num_parts))
    return out


def begin(inputs: Inputs, step: Inputs) -> None:
    """Prepare `step`, whose passes have a row for each span of `inputs`: the row after the span's wanted one, as soon as `advance` has moved
    it there."""
    num_spans, num_stores = inputs.bucket.num_spans, inputs.stores.numel()
    programs.begin[(triton.cdiv(max(num_spans, num_stores), _COPIED),)](
        inputs.positions,
        inputs.wanted,
        inputs.capacities,
        inputs.stores,
        step.positions,
        step.capacities,
        step.stores,
        step.row_spans,
        num_spans,
        num_stores,
        BLOCK=_COPIED,
    )


def advance(chosen: Tensor, ids: Tensor, step: Inputs) -> None:
    """Let the next pass of `step` read the chosen ids, and write them to `ids`. chosen: [R] of any type, -1 where there is none. ids: [R]"""
    num_rows = ids.shape[0]
    programs.advance[(1,)](chosen, ids, step.ids, step.positions, num_rows, BLOCK=triton.next_power_of_2(num_rows))
