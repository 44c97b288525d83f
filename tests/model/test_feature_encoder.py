"""Whisper as a flattened ragged batch, compared with separate passes of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.kernels import load_kernels, why_none
from foredraft.model import LanguageModel, LoadOptions, Read, load_model
from foredraft.model.encoder_inputs import FeatureShape
from foredraft.model.feature_encoder import FeatureEncoderBody
from foredraft.model.loading import examine
from tests.model.test_encoder_decoder import random_ids, read_in_chunks
from tests.model.zoo import WHISPER, random_model, sound

SHAPE = FeatureShape(16, 80)
LENS = (10, 45, 18, 1)


@cache
def loaded() -> LanguageModel:
    """A random model whose logits have a standard deviation of 1, so that its head does not magnify rounding errors."""
    return load_model(random_model(WHISPER.config(), sharpness=1.0), LoadOptions())


def own_logits(features: Tensor, text: Sequence[int]) -> Tensor:
    """transformers' logits, in a pass of its own, with its own eager attention."""
    hf = random_model(WHISPER.config(), sharpness=1.0)
    hf.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: Tensor = hf(input_features=features[None], decoder_input_ids=torch.tensor([text])).logits[0]
    return logits


def open_cache(model: LanguageModel, sounds: Sequence[Tensor], texts: Sequence[Sequence[int]]) -> KVCache:
    held = model.new_cache(MemoryPool(1 << 30))
    for seq_id, (features, text) in enumerate(zip(sounds, texts, strict=True)):
        assert held.open(seq_id, SHAPE.source_of(features))
        assert held.reserve(seq_id, len(text))
    return held


def test_logits_of_a_ragged_batch_are_those_of_separate_passes() -> None:
    sounds, texts = [sound(SHAPE, seed) for seed in range(len(LENS))], random_ids(LENS, 2)
    measured = read_in_chunks(loaded(), open_cache(loaded(), sounds, texts), texts)
    for ours, features, text in zip(measured, sounds, texts, strict=True):
        assert float((ours - own_logits(features, text)).abs().max()) <= 1e-4
    others = read_in_chunks(loaded(), open_cache(loaded(), sounds[::-1], texts), texts)
    assert all(float((a - b).abs().max()) > 0.1 for a, b in zip(measured, others, strict=True))


def test_rows_of_a_tree_are_those_of_their_chains() -> None:
    features, (text,) = sound(SHAPE, 5), random_ids([9], 4)
    held = open_cache(loaded(), [features], [[*text, *range(6)]])
    loaded().read([Read(0, text[:-1], 0)], held)
    logits = loaded().read([Read(0, [text[-1], 5, 6, 7, 8, 9], 6, [-1, 0, 1, 0, 3, 3])], held)
    for node, path in {1: [5], 2: [5, 6], 3: [7], 4: [7, 8], 5: [7, 9]}.items():
        assert float((logits[node] - own_logits(features, [*text, *path])[-1]).abs().max()) <= 1e-4


def test_measured_traits_match_the_memory_of_the_cache() -> None:
    traits = loaded().traits
    assert (traits.source_len, traits.context_len, traits.feature_shape) == (40, 256, SHAPE)
    assert traits.bytes_per_source_token == 2 * 3 * 64 * 4
    held = open_cache(loaded(), [sound(SHAPE, 0)], [[2, 7]])
    assert held.bytes_running == held.bytes_for(2, 40)


@pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")
@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions(quantization="int8")])
def test_low_precision_rows_have_the_same_bits_in_every_batch(options: LoadOptions, tmp_path: Path) -> None:
    random_model(WHISPER.config()).bfloat16().save_pretrained(tmp_path)
    assert examine(tmp_path, options).model_type == "whisper"
    model = load_model(tmp_path, options)
    assert isinstance(model.body, FeatureEncoderBody)
    assert model.traits.row_exact
    sounds, texts = [sound(SHAPE, seed) for seed in range(len(LENS))], random_ids(LENS, 2)
    together = read_in_chunks(model, open_cache(model, sounds, texts), texts)
    for ours, features, text in zip(together, sounds, texts, strict=True):
        alone = model.read([Read(0, text, len(text))], open_cache(model, [features], [text]))
        assert torch.equal(ours, alone)
