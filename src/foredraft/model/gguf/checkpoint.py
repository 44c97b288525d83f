"""A GGUF file as a checkpoint."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ModelError
from foredraft.model.checkpoint import is_gguf, refuse_unusable
from foredraft.model.gguf.assembly import assemble
from foredraft.model.gguf.blocks import BLOCK_TYPES
from foredraft.model.gguf.config import architecture_of, config_of
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.tokenizer import tokenizer_of
from foredraft.model.memory import refuse_more_than_free
from foredraft.model.options import LoadOptions
from foredraft.model.stored import materialize

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class GGUFCheckpoint:
    """name: a path to the file."""

    def __init__(self, name: str, options: LoadOptions) -> None:
        self._name, self._options = name, options

    @classmethod
    def of(cls, name: str, options: LoadOptions) -> GGUFCheckpoint | None:
        """None for anything but a GGUF file."""
        return cls(name, options) if is_gguf(Path(name)) else None

    def check(self, *, has_weights: bool) -> None:
        refuse_unusable(self._name, has_weights=has_weights)
        Metadata(self._file())

    def config(self) -> PretrainedConfig:
        return config_of(self._file())

    def quantization(self, config: PretrainedConfig) -> str | None:
        kinds = sorted({entry.kind for entry in self._file().tensors.values()} & BLOCK_TYPES.keys())
        return ", ".join(kinds) or None

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """Quantized matrices stay stored on a CPU, where the body decides how to use them."""
        file, options = self._file(), self._options
        device = options.torch_device()
        takes_blocks = device.type == "cpu" and dtype == torch.bfloat16 and options.kernels == "auto"
        refuse_more_than_free(self._name, _needed(file, None if takes_blocks else dtype), device)
        metadata = Metadata(file)
        hf = assemble(file, architecture_of(metadata, file), metadata.architecture, config, dtype)
        if device.type != "cpu":
            materialize(hf)
        _set_sampling(hf, metadata)
        return hf

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self._file())

    def _file(self) -> GGUFFile:
        file = GGUFFile(Path(os.fspath(self._name)))
        parts = file.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise ModelError(
                f"{self._name}: this is one of {parts} parts of a model; join them with llama-gguf-split --merge"
            )
        return file


def _needed(file: GGUFFile, dtype: torch.dtype | None) -> int:
    """Bytes of the weights, in `dtype` or as stored."""
    if dtype is None:
        return sum(entry.num_bytes for entry in file.tensors.values())
    return sum(prod(entry.shape) for entry in file.tensors.values()) * dtype.itemsize


def _set_sampling(hf: Any, metadata: Metadata) -> None:
    """Set the sampling options that the file recommends, if any."""
    config = getattr(hf, "generation_config", None)
    for key, field in _SAMPLING.items():
        full = f"general.sampling.{key}"
        if config is not None and full in metadata:
            value = metadata.integer(full, low=0) if field == "top_k" else metadata.number(full)
            setattr(config, field, value)
            config.do_sample = True
