"""The inputs of encoders: the ids of a text, or the features of an audio recording."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from foredraft.engine.sources import FeatureSource, Source, TokenSource
from foredraft.errors import ForedraftError
from foredraft.model.context import context_len_of
from foredraft.model.trial_ids import random_ids

_FEATURE_READERS = ("whisper",)
"""The model_type of models that read features."""

_FRAMES_PER_ROW = 2
"""The stride of Whisper's convolutions."""


class EncoderInputs(Protocol):
    """The kind of source that a model reads. source_len: the longest source."""

    @property
    def source_len(self) -> int: ...

    def random(self, length: int, generator: torch.Generator) -> Source:
        """A random source for a trial, of this length if lengths can vary."""

    def arguments(self, source: Source) -> dict[str, Tensor]:
        """The arguments of the library's forward for one source."""


class TokenInputs:
    """The inputs of a model that reads text."""

    def __init__(self, hf: PreTrainedModel, name: str) -> None:
        self.source_len = context_len_of(hf.get_encoder().config, name)
        self._vocab_size = int(hf.get_input_embeddings().num_embeddings)
        self._device = hf.device

    def random(self, length: int, generator: torch.Generator) -> Source:
        """See EncoderInputs."""
        return TokenSource(tuple(random_ids(length, self._vocab_size, generator)))

    def arguments(self, source: Source) -> dict[str, Tensor]:
        """See EncoderInputs. They include a mask, since some families would take an id for padding."""
        ids = torch.tensor([source.ids], device=self._device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class FeatureShape(NamedTuple):
    """The shape of a feature extractor's output for one recording, including the silence after its end."""

    num_mel_bins: int
    num_frames: int

    def source_of(self, features: Any) -> FeatureSource:
        """A copy of the features, in float32. features: [num_mel_bins, num_frames], a tensor, an array or lists. Raises ForedraftError
        for anything else."""
        try:
            rows = torch.as_tensor(features).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ForedraftError("input_features must be a tensor or an array of numbers") from error
        if tuple(rows.shape) != self:
            raise ForedraftError(
                f"input_features have the shape {list(rows.shape)}, but the encoder reads {list(self)}: give one recording, as "
                "its feature extractor pads it (input_features[0] of what it returns)"
            )
        rows = rows.to("cpu", torch.float32, copy=True).contiguous()
        if not bool(rows.isfinite().all()):
            raise ForedraftError("input_features contain numbers that are not finite")
        return FeatureSource(rows, self.num_frames // _FRAMES_PER_ROW)


class FeatureInputs:
    """The inputs of a model that reads audio (Whisper, arXiv:2212.04356)."""

    def __init__(self, hf: PreTrainedModel) -> None:
        shape = feature_shape_of(hf.config)
        assert shape is not None
        self._shape, self._hf = shape, hf
        self.source_len = shape.num_frames // _FRAMES_PER_ROW

    def random(self, length: int, generator: torch.Generator) -> Source:
        """See EncoderInputs."""
        return self._shape.source_of(torch.randn(self._shape, generator=generator))

    def arguments(self, source: Source) -> dict[str, Tensor]:
        """See EncoderInputs."""
        assert isinstance(source, FeatureSource)
        return {"input_features": source.features[None].to(self._hf.device, self._hf.dtype)}


def feature_shape_of(config: PretrainedConfig) -> FeatureShape | None:
    """The shape of the features that an encoder with this configuration reads; None if it reads ids, or there is no encoder."""
    if not (config.is_encoder_decoder and config.model_type in _FEATURE_READERS):
        return None
    settings: Any = config
    return FeatureShape(settings.num_mel_bins, settings.max_source_positions * _FRAMES_PER_ROW)


def encoder_inputs_of(hf: PreTrainedModel, name: str) -> EncoderInputs:
    """hf: a model with an encoder."""
    return TokenInputs(hf, name) if feature_shape_of(hf.config) is None else FeatureInputs(hf)
