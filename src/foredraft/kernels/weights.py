"""Weights of linear layers: unquantised, quantised, and packed for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.kernels.structs import MatrixStruct

BF16, INT8, INT4_GROUPS, LEVEL_GROUPS, INT8_GROUPS = range(5)
"""Storage formats of packed matrices, numbered as in structs.h."""

INT4_GROUP = 32
"""Inputs that share a scale when quantize_int4 rounds weights to four bits."""

_LARGEST_INT8 = 127
_LEAST_INT4, _LARGEST_INT4 = -8, 7
_LEAST_GROUP = 8
_HALF_PRECISION = 2.0**-11
_NUMBERS_AT_A_TIME = 1 << 20


class QuantizedWeight(NamedTuple):
    """weight[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group].

    codes: [n, k] int8. scales, offsets: [n, k / group] float32; offsets None: all 0. group: the number of inputs that share a
    scale. bits: 8, or 4 if at most 16 different codes occur: -8 .. 7, or the numbers in `levels` [16] int8, ascending.
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
"""[n, k], floating point or quantised."""

WeightFormat = Callable[[Tensor], Weight]
"""Converts a loaded weight before it is packed. It treats each row independently, so a weight can be converted in blocks."""


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
    num_rows = max(1, _NUMBERS_AT_A_TIME // max(1, weight.shape[1]))  # never hold all of a wide matrix in float32
    for first in range(0, weight.shape[0], num_rows):
        some = slice(first, first + num_rows)
        rows = weight[some].detach().to(torch.float32, copy=True)
        scales[some] = scale = rows.abs().amax(1, keepdim=True) / _LARGEST_INT8
        codes[some] = rows.div_(scale.clamp(min=1e-30)).round_().to(torch.int8)
    return QuantizedWeight(codes, scales, None, weight.shape[1], 8)


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """Round to nearest, with a scale for each 32 inputs that maps the weight of the largest magnitude to -8 (llama.cpp's Q4_0). If the
    number of inputs is no multiple of 32, use quantize_int8. weight: [n, k] float"""
    n, k = weight.shape
    if k % INT4_GROUP:
        return quantize_int8(weight)
    codes = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, k // INT4_GROUP)
    num_rows = max(1, _NUMBERS_AT_A_TIME // max(1, k))
    for first in range(0, n, num_rows):
        some = slice(first, first + num_rows)
        groups = weight[some].detach().to(torch.float32, copy=True).view(-1, k // INT4_GROUP, INT4_GROUP)
        low, high = groups.aminmax(dim=2)
        scale = _float16_where_it_can_be(torch.where(high > -low, high, low) / _LEAST_INT4)
        steps = torch.where(scale == 0, 1.0, scale)[..., None]
        codes[some] = groups.div_(steps).round_().clamp_(_LEAST_INT4, _LARGEST_INT4).view(-1, k)
        scales[some] = scale
    return QuantizedWeight(codes, scales, None, INT4_GROUP, 4)


def _float16_where_it_can_be(scales: Tensor) -> Tensor:
    """Round scales to float16, except those that would change by more than one part in 2048."""
    rounded = scales.half().float()
    return torch.where((rounded - scales).abs() <= _HALF_PRECISION * scales.abs(), rounded, scales)


class Layout(NamedTuple):
    """How a matrix is packed. group: the inputs that share a scale; 0: all. levels: [16] int8, for LEVEL_GROUPS only.
    scale_bytes: 2 for float16, 4 for float32."""

    kind: int
    group: int = 0
    scale_bytes: int = 0
    has_offsets: bool = False
    levels: Tensor | None = None


def layout_of(weight: Weight, scale_dtype: torch.dtype) -> Layout:
    """The layout for a weight. scale_dtype: of the scales of groups. Raises ValueError for a format that no kernel multiplies."""
    if not isinstance(weight, QuantizedWeight):
        return Layout(BF16)
    if is_channelwise_int8(weight):
        return Layout(INT8)
    codes, scales, offsets, group, bits, levels = weight
    is_even = scales.shape == (codes.shape[0], codes.shape[1] // group) and codes.shape[1] % group == 0
    if bits not in (4, 8) or group < _LEAST_GROUP or not is_even or (scales.shape[1] > 1 and group % _LEAST_GROUP):
        raise ValueError(
            f"kernels need 4-bit or 8-bit weights in groups whose size is a multiple of {_LEAST_GROUP} and divides the number of inputs, "
            f"not {bits} bits in groups of {group} for {codes.shape[1]} inputs"
        )
    kind = INT8_GROUPS if bits == 8 else INT4_GROUPS if levels is None else LEVEL_GROUPS
    return Layout(kind, group, scale_dtype.itemsize, offsets is not None, None if bits == 8 else levels)


def packed_scales(weight: QuantizedWeight, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Scales and offsets [n, k / group] as they are packed. Four-bit codes are packed unsigned, 8 higher, and their offsets compensate
    for that."""
    dtype = torch.float16 if layout.scale_bytes == torch.float16.itemsize else torch.float32
    offsets = weight.offsets
    if offsets is not None and layout.kind == INT4_GROUPS:
        offsets = offsets + _LEAST_INT4 * weight.scales
    return weight.scales.to(dtype).contiguous(), None if offsets is None else offsets.to(dtype).contiguous()


def fits(weight: QuantizedWeight, layout: Layout) -> bool:
    """Whether the layout's scale type is precise enough: float16 must change no scale by more than one part in 2048, and no offset by
    more than one part in 2048 of itself or of its scale."""
    if layout.scale_bytes != torch.float16.itemsize:
        return True
    limit = _HALF_PRECISION * weight.scales.abs()
    exact = packed_scales(weight, layout._replace(scale_bytes=torch.float32.itemsize))
    scales, offsets = exact
    if not bool(((scales.half().float() - scales).abs() <= limit).all()):
        return False
    if offsets is None:
        return True
    limit = torch.maximum(limit, _HALF_PRECISION * offsets.abs())
    return bool(((offsets.half().float() - offsets).abs() <= limit).all())


def is_channelwise_int8(weight: QuantizedWeight) -> bool:
    """Whether the weight is symmetric int8 with one scale for each output channel."""
    return weight.bits == 8 and weight.offsets is None and weight.scales.shape[1] == 1


def check_channelwise_int8(weight: QuantizedWeight) -> None:
    """Raises ValueError for a format that PyTorch's int8 products do not support."""
    if not is_channelwise_int8(weight):
        raise ValueError(
            f"int8 products need symmetric 8-bit weights with one scale per output channel, "
            f"not {weight.bits} bits with a scale for every {weight.group} inputs"
        )


class PackedMatrix:
    """One matrix packed for the kernels. tensors: the memory that its struct points to. row_steps: the rows that a quantised matrix
    multiplies are rounded to integers from -row_steps to row_steps."""

    row_steps = _LARGEST_INT8

    def __init__(self, out_features: int, in_features: int, layout: Layout, tensors: dict[str, Tensor]) -> None:
        self.out_features, self.in_features, self.layout = out_features, in_features, layout
        self.tensors = tensors
        if layout.levels is not None:
            tensors["levels"] = layout.levels
        addresses = (address(tensors.get(name)) for name in ("weights", "scales", "corrections", "bias", "levels"))
        self.struct = MatrixStruct(
            *addresses,
            out_features,
            in_features,
            layout.kind,
            layout.group or in_features,
            layout.scale_bytes,
            layout.has_offsets,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def set_memory(self, memory: Tensor) -> None:
        """Set the memory of the weights. memory: [packed bytes] uint8, kept alive"""
        self.tensors["weights"] = memory
        self.struct.weights = memory.data_ptr()


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
