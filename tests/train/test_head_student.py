"""New heads for targets of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PhiConfig

from foredraft import ForedraftError
from foredraft.heads import TargetShape, load_head
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train import DSparkKind, Eagle3Kind, MedusaKind
from foredraft.train.head_student import new_eagle3
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import TargetStates
from tests.model.zoo import SPECIES, random_model

KINDS: dict[str, Any] = {
    "eagle3": Eagle3Kind(),
    "medusa": MedusaKind(),
    "dspark": DSparkKind(block_size=4, mask_token=3),
}
NARROW = {"opt"}
"""Families whose lm_head here reads fewer numbers than the layers write."""
SCALES = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625}, "cohere2": {"logit_scale": 0.25}}


def target_of(hf: Any, folder: Path) -> LanguageModel:
    hf.save_pretrained(folder)
    return load_model(str(folder), LoadOptions(device="cpu", dtype="float32"))


@pytest.mark.parametrize("family", sorted(set(SPECIES) - NARROW))
def test_a_new_head_for_any_family_can_be_loaded_again(family: str, tmp_path: Path) -> None:
    target = target_of(random_model(SPECIES[family].config()), tmp_path / "target")
    for name, kind in KINDS.items():
        head = kind.new(target, [[5, 6, 7]], seed=0)
        kind.save(head, target, "target", tmp_path / name, torch.float32)
        checkpoint = load_head(str(tmp_path / name), TargetShape.of(target.hf.config))
        stored = {key: value for key, value in head.state_dict().items() if key in checkpoint.tensors}
        assert stored.keys() >= {"norm.weight"} or name == "medusa"
        assert all(torch.equal(checkpoint.tensors[key].float(), value) for key, value in stored.items())


@pytest.mark.parametrize("ids", [None, torch.arange(3, 90, 4)], ids=["all ids", "some ids"])
@pytest.mark.parametrize("family", sorted(set(SPECIES) - NARROW))
def test_heads_are_trained_for_the_logits_of_the_target(family: str, ids: Tensor | None, tmp_path: Path) -> None:
    """Also if it multiplies or caps them. Medusa heads begin with them, but for a cap."""
    config = SPECIES[family].config()
    for name, value in SCALES.get(family, {}).items():
        setattr(config, name, value)
    hf = random_model(config)
    target = target_of(hf, tmp_path / "target")
    text = torch.randint(5, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    _, final = TargetStates(target, ())(text)
    expected = hf(text).logits[0]
    logits = TargetLogits.of(target, ids)
    torch.testing.assert_close(logits(final[0]), expected if ids is None else expected[:, ids], atol=1e-4, rtol=1e-4)
    if ids is None and not logits.softcap:
        medusa = MedusaKind(num_heads=1).new(target, [[5]], seed=0)
        torch.testing.assert_close(medusa(final[0])[:, 0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_are_trained_for_the_bias_of_the_lm_head(dtype: str, kernels: str, tmp_path: Path) -> None:
    """Matrices in bfloat16 are packed, by the kernels or by oneDNN: their weights are not kept."""
    config = PhiConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    hf: Any = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(hf.lm_head.bias)
    hf.save_pretrained(tmp_path)
    target = load_model(str(tmp_path), LoadOptions(device="cpu", dtype=dtype, kernels=kernels))
    logits = TargetLogits.of(target, torch.tensor([7, 50]))
    assert logits.bias is not None
    tolerance = {"rtol": 0.0, "atol": 0.0} if dtype == "float32" else {"rtol": 2.0**-8, "atol": 1e-6}
    torch.testing.assert_close(logits.weight, hf.lm_head.weight[[7, 50]].detach(), **tolerance)
    torch.testing.assert_close(logits.bias, hf.lm_head.bias[[7, 50]].detach(), **tolerance)


@pytest.mark.parametrize("family", sorted(NARROW))
def test_a_target_whose_lm_head_is_narrower_than_its_layers_is_refused(family: str, tmp_path: Path) -> None:
    target = target_of(random_model(SPECIES[family].config()), tmp_path / "target")
    for kind in KINDS.values():
        with pytest.raises(ForedraftError, match="its lm_head reads 48 numbers, but its layers write 64"):
            kind.new(target, [[5, 6, 7]], seed=0)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "rotation", "expected"),
    [
        ("llama", LLAMA3, LLAMA3),
        ("llama", {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0}, {"rope_theta": 5e5}),
        ("glm4", {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, {"rope_theta": 5e5}),
    ],
)
def test_a_new_head_rotates_like_its_target_where_heads_can(
    family: str, rotation: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise whole attention heads, with the target's base."""
    config = SPECIES[family].config()
    config.rope_parameters = rotation
    head = new_eagle3(target_of(random_model(config), tmp_path), (0, 1), None, seed=0)
    found = head.config.layer.rope_parameters
    assert found == {"rope_type": "default"} | expected
