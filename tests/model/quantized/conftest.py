"""Fixtures with layers and models in every format, each made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.model.quantized.tensors import LayerTensors, TensorFiles
from tests.model.quantized.packers import KINDS, save_quantized
from tests.model.zoo import SPECIES, random_model

LAYER = "layer"

MakeLayer = Callable[[dict[str, Tensor]], LayerTensors]
MakeCheckpoint = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture
def layer(tmp_path: Path) -> MakeLayer:
    """layer(parts): one layer with these tensors, in a file."""

    def make(parts: dict[str, Tensor]) -> LayerTensors:
        tensors = {f"{LAYER}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        return LayerTensors(TensorFiles(tmp_path), LAYER)

    return make


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """quantized(kind, species): a checkpoint, and the model in memory with its dequantised weights."""

    @cache
    def make(kind: str, species: str = "llama") -> tuple[Path, PreTrainedModel]:
        directory = tmp_path_factory.mktemp("quantized")
        model = random_model(SPECIES[species].config())
        return directory, save_quantized(model, directory, KINDS[kind])

    return make


def weight_of(num_outputs: int = 48, num_inputs: int = 64) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(0))
