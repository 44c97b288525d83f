"""bitsandbytes checkpoints: NF4 and FP4 in blocks of 64, with or without nested scales, and LLM.int8().

Four bits: weight [out * in / 2, 1] uint8, the first value of a byte in its high bits; weight.absmax, float32 or, if nested,
uint8 with a scale and a table of its own; weight.quant_map [16], the value of each code; weight.quant_state.*, a JSON description.
weight = quant_map[code] * absmax. The sixteen values are not multiples of one number, so integers would be off by up to
0.4 % of a block's largest weight: such layers are dequantized when they are read.
Eight bits: weight [out, in] int8 and SCB [out]. weight = code * SCB / 127.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from torch import Tensor

from foredraft.kernels import QuantizedWeight
from foredraft.model.quantized.format import LinearFormat, Settings, is_listed, layer_with
from foredraft.model.quantized.packing import unpacked
from foredraft.model.quantized.plan import StoredMatrix
from foredraft.model.quantized.tensors import LayerTensors, UnreadableError

_KINDS = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_PARTS_4 = (
    *(f".weight.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
    *(f".{_STATE}{kind}" for kind in _KINDS),
)
_PARTS_8 = (".SCB", ".weight_format")
_LARGEST_INT8 = 127


class BitsAndBytes(LinearFormat):
    """settings: load_in_4bit or load_in_8bit, llm_int8_skip_modules. A layer's own tensors define the rest."""

    def __init__(self, settings: Settings) -> None:
        storage = settings.get("bnb_4bit_quant_storage") or "uint8"
        if storage != "uint8":
            raise UnreadableError(f"quantization_config.bnb_4bit_quant_storage is {storage!r}; supported: uint8")
        self._excluded = settings.get("llm_int8_skip_modules") or []

    def layer_of(self, name: str, dtype: str) -> str | None:
        layer = layer_with((*_PARTS_4, *_PARTS_8), name)
        is_weight = name.endswith(".weight") and dtype in ("U8", "I8")
        return name.removesuffix(".weight") if layer is None and is_weight else layer

    def is_excluded(self, layer: str) -> bool:
        return is_listed(layer, self._excluded)

    def matrix(self, tensors: LayerTensors, shape: tuple[int, int]) -> StoredMatrix:
        if tensors.dtype("weight") == "I8":
            tensors.check("weight", shape, "I8")
            tensors.check("SCB", shape[:1])
            return StoredMatrix(_Int8Source(tensors, shape))
        return StoredMatrix(_TableSource(tensors, shape, _State(tensors, shape)))


class _Int8Source:
    def __init__(self, tensors: LayerTensors, shape: tuple[int, int]) -> None:
        self._tensors, self.shape = tensors, shape

    def rows(self, first: int, end: int) -> QuantizedWeight:
        scales = self._tensors.read("SCB")[first:end, None].float() / _LARGEST_INT8
        codes = self._tensors.read("weight")[first:end].contiguous()
        return QuantizedWeight(codes, scales, None, codes.shape[1], 8)


class _State:
    """The checked description of a four-bit layer."""

    def __init__(self, tensors: LayerTensors, shape: tuple[int, int]) -> None:
        kind = next((kind for kind in _KINDS if tensors.has(f"{_STATE}{kind}")), None)
        if kind is None:
            raise UnreadableError(f"{tensors.layer}.{_STATE}nf4 is missing; download the checkpoint again")
        settings = _json(tensors, f"{_STATE}{kind}")
        size = shape[0] * shape[1]
        if list(settings.get("shape", ())) != list(shape):
            raise UnreadableError(
                f"{tensors.layer} is {settings.get('shape')} according to its quant_state but {list(shape)} in the model"
            )
        self.block = _positive(tensors, settings, "blocksize")
        num_blocks = -(-size // self.block)
        tensors.check("weight", (-(-size // 2), 1), "U8")
        tensors.check("weight.quant_map", (16,))
        self.nested_block = 0
        if tensors.has("weight.nested_absmax"):
            self.nested_block = _positive(tensors, settings, "nested_blocksize")
            self.nested_offset = float(settings.get("nested_offset", 0.0))
            tensors.check("weight.nested_absmax", (-(-num_blocks // self.nested_block),))
            tensors.check("weight.nested_quant_map", (256,))
            tensors.check("weight.absmax", (num_blocks,), "U8")
        else:
            tensors.check("weight.absmax", (num_blocks,))


class _TableSource:
    def __init__(self, tensors: LayerTensors, shape: tuple[int, int], state: _State) -> None:
        self._tensors, self._state, self.shape = tensors, state, shape

    def rows(self, first: int, end: int) -> Tensor:
        """-> [end - first, in] float32. Blocks continue from row to row."""
        width = self.shape[1]
        start, stop = first * width, end * width
        pairs = self._tensors.read("weight").flatten()[start // 2 : -(-stop // 2)]
        nibbles = unpacked(pairs, 4).view(-1, 2).flip(1).flatten()[start % 2 :][: stop - start]
        numbers = self._tensors.read("weight.quant_map").float()[nibbles.int()]
        return (numbers * self._largest(start, stop)).view(end - first, width)

    def _largest(self, start: int, stop: int) -> Tensor:
        """The absmax of the block of each number start .. stop."""
        block = self._state.block
        first = start // block
        largest = self._scales[first : -(-stop // block)].repeat_interleave(block)
        return largest[start - first * block :][: stop - start]

    @cached_property
    def _scales(self) -> Tensor:
        """[blocks] float32"""
        state, read = self._state, self._tensors.read
        absmax = read("weight.absmax")
        if not state.nested_block:
            return absmax.float()
        outer = read("weight.nested_absmax").float().repeat_interleave(state.nested_block)[: len(absmax)]
        return read("weight.nested_quant_map").float()[absmax.int()] * outer + state.nested_offset


def _json(tensors: LayerTensors, part: str) -> dict[str, Any]:
    try:
        settings = json.loads(bytes(tensors.read(part).tolist()))
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UnreadableError(f"{tensors.layer}.{part} is not a JSON object; download the checkpoint again")
    return settings


def _positive(tensors: LayerTensors, settings: dict[str, Any], key: str) -> int:
    value = settings.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnreadableError(f"{tensors.layer}: {key} is {value!r} in its quant_state; a positive number is needed")
    return value
