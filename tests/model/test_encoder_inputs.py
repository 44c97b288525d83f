"""Input features are copied, or refused in one line if the encoder could not read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.model.encoder_inputs import FeatureShape, feature_shape_of
from tests.model.zoo import ENCODER_DECODERS, SPECIES, WHISPER, sound

SHAPE = FeatureShape(16, 80)


def test_the_shape_is_that_of_the_configuration() -> None:
    assert feature_shape_of(WHISPER.config()) == SHAPE
    assert feature_shape_of(ENCODER_DECODERS["bart"].config()) is None
    assert feature_shape_of(SPECIES["llama"].config()) is None


def test_features_may_be_a_tensor_an_array_or_lists_and_are_copied() -> None:
    features = sound(SHAPE, 1)
    source = SHAPE.source_of(features)
    assert len(source) == 40
    assert source == SHAPE.source_of(features.numpy()) == SHAPE.source_of(features.tolist())
    assert source == SHAPE.source_of(features.numpy().astype(np.float64))
    assert source == SHAPE.source_of(features.T.contiguous().T)
    before = features.clone()
    features += 1
    assert torch.equal(source.features, before)
    assert source != SHAPE.source_of(features)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (sound((1, 16, 80), 0), r"have the shape \[1, 16, 80\], but the encoder reads \[16, 80\]: give one recording"),
        (sound((16, 79), 0), r"have the shape \[16, 79\]"),
        ("sound.wav", "must be a tensor or an array of numbers"),
        ([[1.0], [1.0, 2.0]], "must be a tensor or an array of numbers"),
        (None, "must be a tensor or an array of numbers"),
        (torch.full(SHAPE, float("nan")), "not finite"),
    ],
)
def test_unreadable_features_are_refused(features: Any, words: str) -> None:
    with pytest.raises(ForedraftError, match=words):
        SHAPE.source_of(features)
