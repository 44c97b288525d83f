"""GPTQ checkpoints from AutoGPTQ and GPTQModel: four or eight bits, packed along inputs, with or without act-order.

qweight: [in * bits / 32, out] int32; qzeros: [in / group, out * bits / 32] int32; scales: [in / group, out]; g_idx: [in]
int32, the group of each input. weight[o, i] = scales[g, o] * (q - z). Version 1 stores z - 1 modulo 2^bits,
version 2 stores z.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from foredraft.kernels import QuantizedWeight
from foredraft.model.quantized.format import LinearFormat, Settings, check_setting, layer_with
from foredraft.model.quantized.packing import WORD, centered, group_size, input_order, unpacked, unpacked_range
from foredraft.model.quantized.plan import StoredMatrix
from foredraft.model.quantized.tensors import LayerTensors, UnreadableError

_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")
_BITS = (4, 8)
_ZERO_SHIFT = {"gptq": 1, "gptq_v2": 0}


class Gptq(LinearFormat):
    """settings: bits, group_size, checkpoint_format or format. With `dynamic`, layers may differ in bits and groups, which the shapes of
    their tensors show."""

    def __init__(self, settings: Settings) -> None:
        self._bits = check_setting(settings, "bits", _BITS)
        self._group = settings.get("group_size", 128)
        key = "checkpoint_format" if settings.get("checkpoint_format") is not None else "format"
        self._zero_shift = _ZERO_SHIFT[check_setting(settings, key, list(_ZERO_SHIFT), "gptq")]
        self._differs = bool(settings.get("dynamic"))

    def layer_of(self, name: str, dtype: str) -> str | None:
        return layer_with(_PARTS, name)

    def is_excluded(self, layer: str) -> bool:
        return False  # its settings do not name layers: the tensors show which are quantized

    def matrix(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredMatrix:
        num_outputs, num_inputs = shape
        bits = self._bits_of(tensors, num_inputs)
        num_groups = tensors.shape("scales")[0]
        group = group_size(tensors.layer, num_inputs, num_groups)
        if not self._differs and group != (num_inputs if self._group == -1 else self._group):
            raise UnreadableError(
                f"{tensors.layer}.scales has groups of {group} inputs but quantization_config.group_size is {self._group}"
            )
        tensors.check("qweight", (num_inputs * bits // WORD, num_outputs), "I32")
        tensors.check("scales", (num_groups, num_outputs))
        tensors.check("qzeros", (num_groups, num_outputs * bits // WORD), "I32")
        order = None
        if tensors.has("g_idx"):
            tensors.check("g_idx", (num_inputs,), "I32")
            order = input_order(tensors.layer, tensors.read("g_idx"), group)
        return StoredMatrix(_GptqSource(tensors, shape, bits, self._zero_shift, order), order)

    def _bits_of(self, tensors: LayerTensors, num_inputs: int) -> int:
        if not self._differs:
            return int(self._bits)
        bits = tensors.shape("qweight")[0] * WORD // num_inputs
        if bits not in _BITS:
            raise UnreadableError(f"{tensors.layer} has {bits} bits; supported: 4, 8")
        return bits


class _GptqSource:
    def __init__(
        self, tensors: LayerTensors, shape: tuple[int, int], bits: int, zero_shift: int, order: Tensor | None
    ) -> None:
        self.shape = shape
        self._tensors, self._bits, self._zero_shift, self._order = tensors, bits, zero_shift, order

    def rows(self, first: int, end: int) -> QuantizedWeight:
        values = unpacked(self._tensors.read("qweight")[:, first:end].T, self._bits)
        if self._order is not None:
            values = values[:, self._order]
        scales = self._tensors.read("scales")[:, first:end].T
        return centered(values, scales, None if self._is_symmetric else self._zeros(first, end), self._bits)

    def _zeros(self, first: int, end: int) -> Tensor:
        stored = unpacked_range(self._tensors.read("qzeros"), self._bits, first, end)
        return (stored.T.to(torch.int32) + self._zero_shift) & ((1 << self._bits) - 1)

    @cached_property
    def _is_symmetric(self) -> bool:
        return bool((self._zeros(0, self.shape[0]) == 1 << (self._bits - 1)).all())
