"""Checkpoints of compressed-tensors (llm-compressor): integers of four or eight bits, packed or not.

pack-quantized: weight_packed [out, in * bits / 32] int32, the value plus half its range; weight_scale [out, groups];
weight_zero_point [out * bits / 32, groups] int32 if asymmetric, packed along outputs; weight_shape [2]; weight_g_idx
[in] with act-order. int-quantized: weight [out, in] int8, weight_scale, weight_zero_point int8.
weight[o, i] = weight_scale[o, g] * (q - z).

Activations are in the model's dtype or, in the kernels, in eight bits with one scale per row, whether or not the settings
ask for that: only static scales and other widths of activations are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from foredraft.kernels import QuantizedWeight
from foredraft.model.quantized.format import LinearFormat, Settings, layer_with
from foredraft.model.quantized.packing import WORD, centered, group_size, input_order, unpacked, unpacked_range
from foredraft.model.quantized.plan import StoredMatrix
from foredraft.model.quantized.tensors import LayerTensors, UnreadableError, read_values

COMPRESSED_TENSORS = "compressed-tensors"
"""The format's `quant_method` in config.json."""

_PACKED, _INTEGERS = "pack-quantized", ("int-quantized", "naive-quantized")
_PARTS = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
_STRATEGIES = ("group", "channel", "tensor")
_MIXED = "mixed-precision"
_LINEAR = "Linear"
_REGEX = "re:"


class CompressedTensors(LinearFormat):
    """settings: format, config_groups, ignore; sparsity, transforms and quantized caches are refused."""

    def __init__(self, settings: Settings) -> None:
        for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
            if _is_set(settings.get(key)):
                raise UnreadableError(f"quantization_config.{key} is set, but foredraft does not support it")
        groups = settings.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise UnreadableError("quantization_config.config_groups should map names to schemes")
        self._schemes = [_Scheme(name, group, settings.get("format")) for name, group in groups.items()]
        self._ignore = settings.get("ignore") or []

    def layer_of(self, name: str, dtype: str) -> str | None:
        layer = layer_with(_PARTS, name)
        return name.removesuffix(".weight") if layer is None and name.endswith(".weight") and dtype == "I8" else layer

    def is_excluded(self, layer: str) -> bool:
        return any(_names(pattern, layer) for pattern in self._ignore)

    def matrix(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredMatrix:
        scheme = self._scheme_of(tensors.layer)
        if scheme.is_symmetric and tensors.has("weight_zero_point") and bool(tensors.read("weight_zero_point").any()):
            raise UnreadableError(f"{tensors.layer}.weight_zero_point is not zero, but its scheme says symmetric")
        num_groups = scheme.num_groups(tensors, shape)
        if not scheme.is_packed:
            return StoredMatrix(_integers(tensors, shape, num_groups, scheme))
        return _packed(tensors, shape, num_groups, scheme)

    def _scheme_of(self, layer: str) -> _Scheme:
        """The scheme that names the layer, else the one for all linear layers."""
        for covers in (lambda target: _names(target, layer), lambda target: target == _LINEAR):
            for scheme in self._schemes:
                if any(covers(target) for target in scheme.targets):
                    return scheme
        raise UnreadableError(f"{layer} is quantized, but no group of quantization_config.config_groups targets it")


class _Scheme:
    """How the layers of one group are quantized. Raises UnreadableError for settings that are not supported."""

    def __init__(self, name: str, group: Mapping[str, Any], default_format: str | None) -> None:
        where = f"quantization_config.config_groups.{name}"
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise UnreadableError(f"{where}.weights is missing: only quantized weights are supported")
        own_format = group.get("format") or default_format
        _check(f"{where}.weights.type", weights.get("type", "int"), ("int",))
        _check(f"{where}.format" if default_format == _MIXED else "quantization_config.format", own_format, _FORMATS)
        self.bits = int(_check(f"{where}.weights.num_bits", weights.get("num_bits", 8), (4, 8)))
        self.is_symmetric = bool(weights.get("symmetric", True))
        self.group = weights.get("group_size")
        default = "group" if self.group not in (None, -1) else "channel"
        strategy = weights.get("strategy") or default
        self.strategy = str(_check(f"{where}.weights.strategy", strategy, _STRATEGIES))
        self.is_packed = own_format == _PACKED
        self.targets = [str(target) for target in group.get("targets", ())]
        _check_activations(f"{where}.input_activations", group.get("input_activations"))
        if group.get("output_activations") is not None:
            raise UnreadableError(f"{where}.output_activations is set, but foredraft does not support it")

    def num_groups(self, tensors: LayerTensors, shape: tuple[int, int]) -> int:
        """The number of scales per row. Checks the shape of the scales."""
        num_outputs, num_inputs = shape
        if self.strategy == "tensor":
            if tensors.shape("weight_scale") not in ((), (1,), (1, 1)):
                tensors.check("weight_scale", (1,))
            return 1
        num_groups = 1
        if self.strategy == "group":
            num_groups = num_inputs // self.group if self.group else 0
            group_size(tensors.layer, num_inputs, num_groups)
        tensors.check("weight_scale", (num_outputs, num_groups))
        return num_groups


_FORMATS = (_PACKED, *_INTEGERS)


def _packed(tensors: LayerTensors, shape: tuple[int, int], num_groups: int, scheme: _Scheme) -> StoredMatrix:
    num_outputs, num_inputs = shape
    bits = scheme.bits
    tensors.check("weight_packed", (num_outputs, -(-num_inputs * bits // WORD)), "I32")
    tensors.check("weight_shape", (2,), "I64", "I32")
    if read_values(tensors.read("weight_shape")) != [num_outputs, num_inputs]:
        raise UnreadableError(
            f"{tensors.layer}.weight_shape says {read_values(tensors.read('weight_shape'))}, but the model needs "
            f"{[num_outputs, num_inputs]}"
        )
    if not scheme.is_symmetric:
        tensors.check("weight_zero_point", (-(-num_outputs * bits // WORD), num_groups), "I32")
    order = None
    if tensors.has("weight_g_idx"):
        tensors.check("weight_g_idx", (num_inputs,), "I32", "I64")
        order = input_order(tensors.layer, tensors.read("weight_g_idx"), num_inputs // num_groups)
    return StoredMatrix(_PackedSource(tensors, shape, scheme, order), order)


def _integers(tensors: LayerTensors, shape: tuple[int, int], num_groups: int, scheme: _Scheme) -> _IntegerSource:
    tensors.check("weight", shape, "I8")
    if not scheme.is_symmetric:
        tensors.check("weight_zero_point", (shape[0], num_groups), "I8")
    return _IntegerSource(tensors, shape, scheme)


class _PackedSource:
    def __init__(self, tensors: LayerTensors, shape: tuple[int, int], scheme: _Scheme, order: Tensor | None) -> None:
        self.shape = shape
        self._tensors, self._scheme, self._order = tensors, scheme, order

    def rows(self, first: int, end: int) -> QuantizedWeight:
        values = unpacked(self._tensors.read("weight_packed")[first:end], self._scheme.bits)[:, : self.shape[1]]
        if self._order is not None:
            values = values[:, self._order]
        zeros = None
        if not self._scheme.is_symmetric:
            words = self._tensors.read("weight_zero_point").T
            zeros = unpacked_range(words, self._scheme.bits, first, end).T
        return centered(values.contiguous(), _scales(self._tensors, first, end), zeros, self._scheme.bits)


class _IntegerSource:
    def __init__(self, tensors: LayerTensors, shape: tuple[int, int], scheme: _Scheme) -> None:
        self._tensors, self._scheme, self.shape = tensors, scheme, shape

    def rows(self, first: int, end: int) -> QuantizedWeight:
        scales = _scales(self._tensors, first, end).float().contiguous()
        codes = self._tensors.read("weight")[first:end].contiguous()
        offsets = None
        if not self._scheme.is_symmetric:
            offsets = -scales * self._tensors.read("weight_zero_point")[first:end].float()
        return QuantizedWeight(codes, scales, offsets, codes.shape[1] // scales.shape[1], self._scheme.bits)


def _scales(tensors: LayerTensors, first: int, end: int) -> Tensor:
    """[end - first, groups]"""
    scales = tensors.read("weight_scale")
    return scales.reshape(1, 1).expand(end - first, 1) if scales.numel() == 1 else scales[first:end]


def _names(target: str, layer: str) -> bool:
    """Whether a target or an exception names this layer: by its name, or by a regular expression after "re:"."""
    if target.startswith(_REGEX):
        return re.match(target.removeprefix(_REGEX), layer) is not None
    return target == layer


def _check_activations(where: str, scheme: Any) -> None:
    if scheme is None:
        return
    _check(f"{where}.type", scheme.get("type", "int"), ("int",))
    _check(f"{where}.num_bits", scheme.get("num_bits", 8), (8,))
    _check(f"{where}.dynamic", scheme.get("dynamic", False), (True,))


def _check(where: str, value: Any, supported: tuple[Any, ...]) -> Any:
    if value not in supported:
        raise UnreadableError(f"{where} is {value!r}; supported: {', '.join(str(option) for option in supported)}")
    return value


def _is_set(value: Any) -> bool:
    """Whether a section of the settings changes how weights are read; older versions write empty or dense sections."""
    return bool(value) and not (isinstance(value, Mapping) and value.get("format") == "dense")
