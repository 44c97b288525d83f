"""Weights of linear layers: as they are, quantized, and packed for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.kernels.structs import MatrixStruct

BF16, INT8 = 0, 1
"""How a packed matrix is stored, numbered as in structs.h."""

_LARGEST_INT8 = 127
_NUMBERS_AT_A_TIME = 1 << 20


class QuantizedWeight(NamedTuple):
    """weight[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group].

    codes: [n, k] int8. scales, offsets: [n, k / group] float32; offsets None stands for 0. group: the inputs that share a
    scale. bits: 8, or 4 where at most 16 different codes occur: -8 .. 7, or the numbers in `levels` [16] int8, ascending.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int
    bits: int
    levels: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantized(self) -> Tensor:
        """[n, k] float32"""
        n, k = self.codes.shape
        numbers = self.codes.view(n, k // self.group, self.group).float() * self.scales[..., None]
        if self.offsets is not None:
            numbers += self.offsets[..., None]
        return numbers.view(n, k)


Weight = Tensor | QuantizedWeight
"""[n, k]: floating point, or quantized."""

WeightFormat = Callable[[Tensor], Weight]
"""What a loaded weight becomes before it is packed. Works on each row by itself, so a weight can be converted in blocks."""


def dequantized(weight: Weight) -> Tensor:
    """[n, k] floating point"""
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


def unquantized(weight: Tensor) -> Weight:
    """The format that leaves weights as they are."""
    return weight


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Round to nearest on a symmetric grid of 127 steps up to each output channel's largest weight. weight: [n, k] float"""
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], 1)
    num_rows = max(1, _NUMBERS_AT_A_TIME // max(1, weight.shape[1]))  # a wide matrix is never there in float32
    for first in range(0, weight.shape[0], num_rows):
        some = slice(first, first + num_rows)
        rows = weight[some].detach().to(torch.float32, copy=True)
        scales[some] = scale = rows.abs().amax(1, keepdim=True) / _LARGEST_INT8
        codes[some] = rows.div_(scale.clamp(min=1e-30)).round_().to(torch.int8)
    return QuantizedWeight(codes, scales, None, weight.shape[1], 8)


def check_channelwise_int8(weight: QuantizedWeight) -> None:
    """Raises ValueError for a format that the int8 products do not read."""
    if weight.bits != 8 or weight.offsets is not None or weight.scales.shape[1] != 1:
        raise ValueError(
            f"int8 products need symmetric 8-bit weights with one scale per output channel, "
            f"not {weight.bits} bits with a scale for each {weight.group} inputs"
        )


class PackedMatrix:
    """One matrix packed for the kernels. tensors: the memory that its struct points to."""

    def __init__(self, out_features: int, in_features: int, kind: int, tensors: dict[str, Tensor]) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.tensors = tensors
        addresses = (address(tensors.get(name)) for name in ("weights", "scales", "corrections", "bias"))
        self.struct = MatrixStruct(*addresses, out_features, in_features, kind)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
