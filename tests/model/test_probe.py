"""The probe's error measure for models with unusual logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from foredraft.model import LoadOptions, load_model
from foredraft.model.probe import relative_error

INF = float("inf")


def test_ids_masked_in_both_models_do_not_count() -> None:
    ours, theirs = torch.tensor([[3.0, -INF, 4.5]]), torch.tensor([[3.0, -INF, 4.0]])
    assert relative_error(ours, theirs) == pytest.approx(0.5 / 5)
    assert relative_error(theirs, theirs) == 0.0


@pytest.mark.parametrize(("ours", "theirs"), [([3.0, -INF], [3.0, 4.0]), ([3.0, 4.0], [3.0, -INF])])
def test_an_id_masked_in_only_one_model_is_an_infinite_error(ours: list[float], theirs: list[float]) -> None:
    assert relative_error(torch.tensor([ours]), torch.tensor([theirs])) == INF


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_with_masked_ids_can_be_loaded(tmp_path: Path, dtype: str) -> None:
    """Its lm_head's bias is -inf for them, as for padding ids in some checkpoints."""
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = PhiForCausalLM(config)
    assert model.lm_head.bias is not None
    with torch.no_grad():
        model.lm_head.bias[60:] = -INF
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, LoadOptions(dtype=dtype, device="cpu")).traits.vocab_size == 64
