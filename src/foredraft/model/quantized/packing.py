"""Small integers packed into larger ones, as several formats do."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.kernels import QuantizedWeight
from foredraft.model.quantized.tensors import UnreadableError

WORD = 32
"""Bits of the integers that values are packed into."""


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Values of 4 or 8 bits, the lowest bits first. words: [..., w] int32 or uint8 -> [..., values] uint8"""
    # copied, because even a contiguous tensor may have strides that forbid other views, if its rows have at most one element
    numbers = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)


def unpacked_range(words: Tensor, bits: int, first: int, end: int) -> Tensor:
    """Values first .. end of those packed along the last dimension. words: [..., w] int32 -> [..., end - first] uint8"""
    per_word = WORD // bits
    start = first // per_word
    values = unpacked(words[..., start : -(-end // per_word)], bits)
    return values[..., first - start * per_word : end - start * per_word]


def centered(values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> QuantizedWeight:
    """(value - zero) * scale. values: [n, k] uint8 of `bits`; scales: [n, k / group]; zeros: integers of the same shape as scales, or
    None if all are in the middle of the range."""
    middle = 1 << (bits - 1)
    codes = (values.view(torch.int8) - 8) if bits == 4 else (values ^ middle).view(torch.int8)
    scales = scales.float().contiguous()
    offsets = None if zeros is None else scales * (middle - zeros.float())
    return QuantizedWeight(codes.contiguous(), scales, offsets, codes.shape[1] // scales.shape[1], bits)


def group_size(layer: str, num_inputs: int, num_groups: int) -> int:
    """How many inputs share a scale. Raises UnreadableError if the groups are not equal."""
    if num_groups < 1 or num_inputs % num_groups:
        raise UnreadableError(f"{layer}: {num_inputs} inputs cannot be divided into {num_groups} equal groups")
    return num_inputs // num_groups


def input_order(layer: str, group_of_input: Tensor, group: int) -> Tensor | None:
    """The inputs sorted by their group ("act-order"), or None if they are in order already. group_of_input: [k]

    Raises UnreadableError if a group has another size.
    """
    num_groups = len(group_of_input) // group
    expected = torch.arange(num_groups).repeat_interleave(group)
    order = torch.argsort(group_of_input, stable=True)
    if not torch.equal(group_of_input[order].to(torch.int64), expected):
        raise UnreadableError(f"{layer}: its g_idx does not assign {group} inputs to each of {num_groups} groups")
    return None if torch.equal(group_of_input.to(torch.int64), expected) else order
