"""Kinds of checkpoints: where a configuration, weights and a tokenizer come from.

A new kind is a class here or in its own file, and a line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from foredraft.errors import ModelError, one_line
from foredraft.model.auto_class import auto_class_of
from foredraft.model.checkpoint import refuse_unusable
from foredraft.model.diagnosis import why_half_loaded, why_not_found, why_not_loaded
from foredraft.model.gguf import GGUFCheckpoint
from foredraft.model.memory import float16_to_bfloat16
from foredraft.model.options import LoadOptions
from foredraft.model.quantized import is_stored_quantized, load_quantized, quantization_of
from foredraft.model.ranks import this_world

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


class Checkpoint(Protocol):
    """A checkpoint that has a name and has not been read yet. Every method raises a one-line ModelError for what cannot work."""

    def check(self, *, has_weights: bool) -> None:
        """Raise ModelError for what its files alone rule out. has_weights: whether the weights must exist."""

    def config(self) -> PretrainedConfig: ...

    def quantization(self, config: PretrainedConfig) -> str | None:
        """How its weights are quantized, in its format's terms; None if they are floating point."""

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        """The model on the CPU, or on the devices of a device map. Linear layers and the embedding may be stored ones
        (model/stored.py)."""

    def tokenizer(self) -> PreTrainedTokenizerBase: ...


class HuggingFaceCheckpoint:
    """name: a hub id or a directory in Hugging Face format."""

    def __init__(self, name: str, options: LoadOptions) -> None:
        self._name, self._options = name, options

    def check(self, *, has_weights: bool) -> None:
        refuse_unusable(self._name, has_weights=has_weights)

    def config(self) -> PretrainedConfig:
        options = self._options
        try:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                self._name, revision=options.revision, trust_remote_code=options.trust_remote_code
            )
        except Exception as error:
            raise ModelError(f"{self._name}: {why_not_found(self._name, error, options.revision)}") from error
        return config

    def quantization(self, config: PretrainedConfig) -> str | None:
        return quantization_of(config)

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
        if is_stored_quantized(config, self._options.torch_device()):
            return load_quantized(self._name, config, dtype, self._options)
        is_narrowed = dtype == torch.bfloat16 and getattr(config.get_text_config(), "dtype", None) == torch.float16
        is_float16 = (
            is_narrowed and self._options.tp_plan is None
        )  # a share is small enough to be converted as it is read
        try:
            hf, report = auto_class_of(config).from_pretrained(
                self._name,
                config=config,
                dtype=torch.float16 if is_float16 else dtype,
                **_placement(self._options),
                revision=self._options.revision,
                trust_remote_code=self._options.trust_remote_code,
                ignore_mismatched_sizes=True,  # refused below, with the reason
                output_loading_info=True,
            )
        except Exception as error:
            raise ModelError(f"{self._name}: {why_not_loaded(self._name, error)}") from error
        reason = why_half_loaded(self._name, hf.config, report)
        if reason is not None:
            raise ModelError(f"{self._name}: {reason}")
        if is_float16:
            float16_to_bfloat16(hf)
        model: PreTrainedModel = hf
        return model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        name, options = self._name, self._options
        if Path(name).is_dir() and not any((Path(name) / file).exists() for file in _TOKENIZER_FILES):
            # the library would make one up for some architectures
            raise ModelError(f"{name}: no tokenizer in this directory; give tokenizer=, or token ids as prompts")
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                name, revision=options.revision, trust_remote_code=options.trust_remote_code
            )
        except Exception as error:
            raise ModelError(
                f"{name}: no tokenizer could be loaded ({one_line(error)}); give tokenizer=, or token ids as prompts"
            ) from error
        return tokenizer


def _placement(options: LoadOptions) -> dict[str, Any]:
    """Arguments of from_pretrained that say on which devices, or in which processes, the weights are placed."""
    if options.device_map is not None:
        return {"device_map": options.device_map}
    if options.tp_plan is not None:
        return {"distributed_config": DistributedConfig(tp_size=this_world().size)}
    return {}


FORMATS: Sequence[Callable[[str, LoadOptions], Checkpoint | None]] = (GGUFCheckpoint.of, HuggingFaceCheckpoint)
"""Each returns a checkpoint for a name of its kind, and None for others. The first match is used."""


def open_checkpoint(name: str, options: LoadOptions) -> Checkpoint:
    """The checkpoint with this name. Nothing is read yet except what shows its kind."""
    return next(found for found in (make(name, options) for make in FORMATS) if found is not None)
