"""MXFP4, in which gpt-oss stores its experts: four-bit floats in groups of 32 that share a power of two.

`<parameter>_blocks`: [experts, out, in / 32, 16] uint8, two neighbours per byte, the first in the low bits; `<parameter>_scales`:
[experts, out, in / 32] uint8. A value is 2^(scale - 127) * +-(0, .5, 1, 1.5, 2, 3, 4, 6); doubled, these are integers.
See the OCP Microscaling Formats (MX) specification.
"""

from __future__ import annotations

import torch

from foredraft.kernels import QuantizedWeight, WeightSource
from foredraft.model.quantized.format import Settings, is_listed, layer_with
from foredraft.model.quantized.packing import unpacked
from foredraft.model.quantized.plan import Plan
from foredraft.model.quantized.tensors import LayerTensors, TensorFiles, UnreadableError

_PARTS = ("_blocks", "_scales")
_GROUP = 32
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_LEVELS = (-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12)
_SCALES = [2.0 ** (exponent - 128) for exponent in range(256)]
"""By the stored byte: 2 ** (byte - 127), halved because the levels are doubled."""


class Mxfp4:
    """settings: modules_to_not_convert."""

    def __init__(self, settings: Settings) -> None:
        self._excluded = settings.get("modules_to_not_convert") or []

    def layer_of(self, name: str, dtype: str) -> str | None:
        return layer_with(_PARTS, name) if dtype == "U8" else None

    def is_excluded(self, layer: str) -> bool:
        return is_listed(layer, self._excluded)

    def place(self, tensors: LayerTensors, plan: Plan) -> None:
        plan.place_experts(tensors.layer, lambda shape: _experts(tensors.files, tensors.layer, shape))


def _experts(files: TensorFiles, parameter: str, shape: tuple[int, int, int]) -> list[WeightSource]:
    num_experts, num_outputs, num_inputs = shape
    groups = (num_experts, num_outputs, num_inputs // _GROUP)
    if num_inputs % _GROUP:
        raise UnreadableError(f"{parameter} has {num_inputs} inputs, which cannot be divided into groups of {_GROUP}")
    _check(files, f"{parameter}_blocks", (*groups, _GROUP // 2))
    _check(files, f"{parameter}_scales", groups)
    return [_Mxfp4Source(files, parameter, expert, (num_outputs, num_inputs)) for expert in range(num_experts)]


def _check(files: TensorFiles, name: str, shape: tuple[int, ...]) -> None:
    if name not in files:
        raise UnreadableError(f"{name} is missing; download the checkpoint again")
    if files.shape(name) != shape or files.dtype(name) != "U8":
        raise UnreadableError(
            f"{name} is {list(files.shape(name))} {files.dtype(name)} in the file but should be {list(shape)} U8; "
            "download the checkpoint again"
        )


class _Mxfp4Source:
    def __init__(self, files: TensorFiles, parameter: str, expert: int, shape: tuple[int, int]) -> None:
        self._files, self._parameter, self._expert, self.shape = files, parameter, expert, shape

    def rows(self, first: int, end: int) -> QuantizedWeight:
        nibbles = unpacked(self._read("_blocks", first, end), 4).flatten(1)
        codes = torch.tensor(_DOUBLED, dtype=torch.int8)[nibbles.int()]
        scales = torch.tensor(_SCALES)[self._read("_scales", first, end).int()]
        return QuantizedWeight(codes, scales, None, _GROUP, 4, torch.tensor(_LEVELS, dtype=torch.int8))

    def _read(self, part: str, first: int, end: int) -> torch.Tensor:
        rows: torch.Tensor = self._files.read(f"{self._parameter}{part}")[self._expert, first:end]
        return rows
