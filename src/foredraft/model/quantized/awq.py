"""AWQ checkpoints in the "gemm" version: four bits, packed along outputs in AWQ's own order.

qweight: [in, out / 8] int32; qzeros: [in / group, out / 8] int32; scales: [in / group, out]. Nibble j of a word is its
output (0, 2, 4, 6, 1, 3, 5, 7)[j]. weight[o, i] = scales[g, o] * (q - z).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from foredraft.kernels import QuantizedWeight
from foredraft.model.quantized.format import LinearFormat, Settings, check_setting, is_listed, layer_with
from foredraft.model.quantized.packing import centered, group_size, unpacked
from foredraft.model.quantized.plan import StoredMatrix
from foredraft.model.quantized.tensors import LayerTensors, UnreadableError

_PARTS = (".qweight", ".qzeros", ".scales")
_BITS = 4
_PER_WORD = 8
_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
_MIDDLE = 8


class Awq(LinearFormat):
    """settings: bits, group_size, version or format, zero_point, modules_to_not_convert."""

    def __init__(self, settings: Settings) -> None:
        check_setting(settings, "bits", (_BITS,), _BITS)
        check_setting(settings, "zero_point", (True,), True)
        key = "version" if settings.get("version") is not None else "format"
        check_setting(settings, key, ("gemm",), "gemm")
        self._group = settings.get("group_size", 128)
        self._excluded = settings.get("modules_to_not_convert") or []

    def layer_of(self, name: str, dtype: str) -> str | None:
        return layer_with(_PARTS, name)

    def is_excluded(self, layer: str) -> bool:
        return is_listed(layer, self._excluded)

    def matrix(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredMatrix:
        num_outputs, num_inputs = shape
        num_groups = tensors.shape("scales")[0]
        group = group_size(tensors.layer, num_inputs, num_groups)
        if group != (num_inputs if self._group == -1 else self._group):
            raise UnreadableError(
                f"{tensors.layer}.scales has groups of {group} inputs but quantization_config.group_size is {self._group}"
            )
        tensors.check("qweight", (num_inputs, num_outputs // _PER_WORD), "I32")
        tensors.check("qzeros", (num_groups, num_outputs // _PER_WORD), "I32")
        tensors.check("scales", (num_groups, num_outputs))
        return StoredMatrix(_AwqSource(tensors, shape))


class _AwqSource:
    def __init__(self, tensors: LayerTensors, shape: tuple[int, int]) -> None:
        self._tensors, self.shape = tensors, shape

    def rows(self, first: int, end: int) -> QuantizedWeight:
        scales = self._tensors.read("scales")[:, first:end].T
        zeros = None if self._is_symmetric else self._values("qzeros", first, end).to(torch.int32)
        return centered(self._values("qweight", first, end).contiguous(), scales, zeros, _BITS)

    def _values(self, part: str, first: int, end: int) -> Tensor:
        """[end - first, inputs or groups] uint8"""
        start = first // _PER_WORD
        words = self._tensors.read(part)[:, start : -(-end // _PER_WORD)]
        nibbles = unpacked(words, _BITS).view(*words.shape, _PER_WORD)[..., _NIBBLE_OF_OUTPUT]
        return nibbles.flatten(1)[:, first - start * _PER_WORD : end - start * _PER_WORD].T

    @cached_property
    def _is_symmetric(self) -> bool:
        return bool((unpacked(self._tensors.read("qzeros"), _BITS) == _MIDDLE).all())
