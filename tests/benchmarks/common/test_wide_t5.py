"""A widened T5 computes what the small one computes."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.common.wide_t5 import WideSize, widen


def small(**settings: object) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, **settings)
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_logits_of_a_widened_t5_are_the_small_ones(feed_forward: str, is_tied: bool) -> None:
    model = small(feed_forward_proj=feed_forward, tie_word_embeddings=is_tied)
    wide = widen(model, WideSize(width=64, num_heads=4, mlp=80, num_layers=3))
    inputs = {"input_ids": torch.randint(3, 50, (2, 11)), "decoder_input_ids": torch.randint(3, 50, (2, 7))}
    with torch.inference_mode():
        expected, logits = model(**inputs).logits, wide(**inputs).logits
    assert float((logits - expected).abs().max()) <= 1e-4 * max(1.0, float(expected.abs().max()))
    assert sum(p.numel() for p in wide.parameters()) > 8 * sum(p.numel() for p in model.parameters())


def test_a_size_below_that_of_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is below the model's width 16"):
        widen(small(), WideSize(8, 2, 24, 2))
    with pytest.raises(ValueError, match="1 layers are fewer than the model's 2"):
        widen(small(), WideSize(16, 2, 24, 1))
