"""How students are initialised: from the target's weights, from a configuration, or from both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from foredraft import ForedraftError
from foredraft.train.muon import orthogonalise
from foredraft.train.optimiser import LearningRates, Optimiser
from foredraft.train.students import from_architecture, spread_layers, with_fewer_layers, with_own_head


@given(st.integers(1, 80), st.data())
def test_layers_are_spread_from_first_to_last(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, total))
    found = spread_layers(total, count)
    assert len(set(found)) == count
    assert found == sorted(found)
    assert found[0] == 0
    assert count == 1 or found[-1] == total - 1


def test_a_student_with_all_layers_equals_the_target(toy: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(toy)
    ids = torch.tensor([[0, 5, 9, 12]])
    with torch.no_grad():
        assert torch.equal(with_fewer_layers(target, 3, 0)(ids).logits, target(ids).logits)


def test_fewer_layers_are_the_targets_own(toy: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(toy)
    student = with_fewer_layers(target, 2, 0)
    assert len(student.model.layers) == 2
    for ours, theirs in zip(student.model.layers, (target.model.layers[0], target.model.layers[2]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert torch.equal(student.model.embed_tokens.weight, target.model.embed_tokens.weight)
    with pytest.raises(ForedraftError, match="from 1 to the target's 3"):
        with_fewer_layers(target, 0, 0)


def test_fewer_layers_keep_what_the_configuration_says_of_each() -> None:
    """Layers without rotary embeddings (SmolLM3), and layers with and without experts."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    smollm3 = SmolLM3ForCausalLM(SmolLM3Config(**sizes, num_hidden_layers=8))
    student = with_fewer_layers(smollm3, 2, 0)
    assert [layer.self_attn.use_rope for layer in student.model.layers] == [
        smollm3.model.layers[index].self_attn.use_rope for index in (0, 7)
    ]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=4, mlp_only_layers=[3]))
    student = with_fewer_layers(moe, 2, 0)
    for ours, theirs in zip(student.model.layers, (moe.model.layers[0], moe.model.layers[3]), strict=True):
        assert type(ours.mlp) is type(theirs.mlp)
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    alternating = Qwen3MoeConfig(**sizes, **experts, num_hidden_layers=5, decoder_sparse_step=2)
    with pytest.raises(ForedraftError, match=r"--layers: the target's layers are of several kinds, and model\.layers"):
        with_fewer_layers(Qwen3MoeForCausalLM(alternating), 3, 0)


def test_giving_a_student_its_own_lm_head_does_not_change_it(toy: Path) -> None:
    student = with_fewer_layers(AutoModelForCausalLM.from_pretrained(toy), 1, 0)
    free = with_own_head(student)
    ids = torch.tensor([[0, 5, 9, 12]])
    with torch.no_grad():
        assert torch.equal(free(ids).logits, student(ids).logits)
    assert free.lm_head.weight is not free.model.embed_tokens.weight
    assert with_own_head(free) is free


def test_random_weights_depend_only_on_the_seed(toy: Path) -> None:
    one, same, other = (from_architecture(toy / "config.json", 4096, seed) for seed in (1, 1, 2))
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    with pytest.raises(ForedraftError, match="vocab_size is 4096"):
        from_architecture(toy, 5000, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 9))
def test_muons_step_has_singular_values_near_one(dtype: torch.dtype, height: int, width: int, seed: int) -> None:
    """Within the bounds of the iteration. The smallest may still be lower if a random matrix is nearly singular."""
    matrix = torch.randn(height, width, generator=torch.Generator().manual_seed(seed))
    values = torch.linalg.svdvals(orthogonalise(matrix, dtype))
    assert float(values.max()) < 1.35
    assert float(values.median()) > 0.5


def test_rates_rise_and_fall() -> None:
    rates = LearningRates(warm_up=0.1)
    shares = [rates.factor(i / 100) for i in range(101)]
    assert max(shares) == shares[10] == 1.0
    assert shares[:11] == sorted(shares[:11])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] == 0.0
    assert 0 < shares[0] < 0.05


def test_every_weight_is_trained_once(toy: Path) -> None:
    model = with_own_head(with_fewer_layers(AutoModelForCausalLM.from_pretrained(toy), 1, 0))
    for name in ("muon", "adamw"):
        optimiser = Optimiser(model, name, LearningRates(warm_up=0.0), 1.0)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model(torch.tensor([[0, 5, 9, 12]])).logits.square().mean().backward()
        optimiser.clip_gradients()
        optimiser.step(0.0)
        assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ForedraftError, match="--optimiser"):
        Optimiser(model, "sgd", LearningRates(), 1.0)
