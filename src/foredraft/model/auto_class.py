"""Choose the library's auto class for a configuration."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, PretrainedConfig

from foredraft.model.encoder_inputs import feature_shape_of


def auto_class_of(config: PretrainedConfig) -> Any:
    """The class for a decoder, or for an encoder-decoder that reads text or audio."""
    if feature_shape_of(config) is not None:
        return AutoModelForSpeechSeq2Seq
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
