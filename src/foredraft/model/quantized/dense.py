"""Quantized checkpoints of small models, such as heads, whose matrices are needed in floating point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels import dequantized
from foredraft.model.quantized.compressed_tensors import COMPRESSED_TENSORS, CompressedTensors
from foredraft.model.quantized.tensors import LayerTensors, TensorFiles, UnreadableError, read_values


def read_dense(folder: Path, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder, by name; for a quantized layer its weight, [out, in] float32. settings: the
    `quantization_config` of its config.json.

    Raises UnreadableError for methods other than compressed-tensors, and for tensors that are missing or have wrong shapes.
    """
    if settings.get("quant_method") != COMPRESSED_TENSORS:
        raise UnreadableError(
            f"quantization_config.quant_method is {settings.get('quant_method')!r}; supported: {COMPRESSED_TENSORS}"
        )
    quantization, files = CompressedTensors(settings), TensorFiles(folder)
    layer_of = {name: quantization.layer_of(name, files.dtype(name)) for name in files}
    tensors = {name: files.read(name) for name, layer in layer_of.items() if layer is None}
    for layer in sorted({layer for layer in layer_of.values() if layer is not None}):
        tensors[f"{layer}.weight"] = _dense(quantization, LayerTensors(files, layer))
    return tensors


def _dense(quantization: CompressedTensors, tensors: LayerTensors) -> Tensor:
    matrix = quantization.matrix(tensors, _shape_of(tensors))
    weight = dequantized(matrix.source.rows(0, matrix.source.shape[0]))
    return weight if matrix.order is None else torch.empty_like(weight).index_copy_(1, matrix.order, weight)


def _shape_of(tensors: LayerTensors) -> tuple[int, int]:
    """[out, in], which a packed weight stores in a tensor of its own"""
    is_packed = tensors.has("weight_shape")
    shape = read_values(tensors.read("weight_shape")) if is_packed else [*tensors.shape("weight")]
    if len(shape) != 2:
        raise UnreadableError(f"{tensors.layer} is quantized, but its weight is {shape}, which is not a matrix")
    return shape[0], shape[1]
