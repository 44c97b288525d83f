"""Our mixture of experts compared with transformers' own, for each of its layouts; and what the bits of a row depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from foredraft.model.experts import run_experts
from tests.model.zoo import SPECIES, random_model

NUM_EXPERTS, WIDTH, INNER = 5, 32, 48


def make_experts(**layout: Any) -> Any:
    """Experts as in transformers. layout: arguments of its decorator."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = NUM_EXPERTS
            self.act_fn = nn.functional.silu
            self.post_expert_norm = nn.LayerNorm(WIDTH)
            first = INNER * (2 if layout.get("has_gate", True) else 1)
            name = "gate_up_proj" if layout.get("has_gate", True) else "up_proj"
            for key, out, inner in ((name, first, WIDTH), ("down_proj", WIDTH, INNER)):
                shape = (inner, out) if layout.get("is_transposed") else (out, inner)
                setattr(self, key, nn.Parameter(torch.randn(NUM_EXPERTS, *shape) / inner**0.5))
                setattr(self, f"{key}_bias", nn.Parameter(torch.randn(NUM_EXPERTS, out)))

        def forward(self, *_: Any) -> Tensor:
            raise AssertionError("the library's own function was not to run")

    torch.manual_seed(0)
    config = SPECIES["mixtral"].config()
    config._experts_implementation = "batched_mm"
    return use_experts_implementation(Experts, **layout)(config).eval()


def routing(num_rows: int, num_choices: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_rows, WIDTH, generator=generator)
    weights, ids = torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(num_choices)
    return hidden, ids, weights


LAYOUTS: list[dict[str, bool]] = [
    {},
    {"is_transposed": True, "has_bias": True},
    {"has_gate": False},
    {"has_gate": False, "has_bias": True, "is_transposed": True},
    {"has_post_expert_norm": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.inference_mode()
def test_every_layout_gives_the_results_of_transformers(layout: dict[str, bool]) -> None:
    experts = make_experts(**layout)
    for num_rows in (1, 7):
        hidden, ids, weights = routing(num_rows)
        assert torch.allclose(run_experts(experts, hidden, ids, weights), experts(hidden, ids, weights), atol=1e-5)


@torch.inference_mode()
def test_a_gate_of_the_models_own_is_used() -> None:
    mlp = random_model(SPECIES["gpt_oss"].config()).model.layers[0].mlp.experts
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weights, ids = torch.rand(6, mlp.num_experts).topk(2)
    mlp.config._experts_implementation = "eager"
    assert torch.allclose(run_experts(mlp, hidden, ids, weights), mlp(hidden, ids, weights), atol=1e-5)


@torch.inference_mode()
def test_experts_of_other_machines_add_nothing() -> None:
    """With expert parallelism ids past the last expert mean experts of other machines."""
    experts = make_experts()
    hidden, ids, weights = routing(4)
    elsewhere = ids.clone()
    elsewhere[:, 1] = NUM_EXPERTS
    expected = run_experts(experts, hidden, ids[:, :1], weights[:, :1])
    assert torch.allclose(run_experts(experts, hidden, elsewhere, weights), expected, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_in_a_batch(layout: dict[str, bool]) -> None:
    experts = make_experts(**layout).bfloat16()
    hidden, ids, weights = routing(40)
    hidden, weights = hidden.bfloat16(), weights.bfloat16()
    together = run_experts(experts, hidden, ids, weights)
    for row in range(40):
        one = slice(row, row + 1)
        assert torch.equal(run_experts(experts, hidden[one], ids[one], weights[one]), together[one])
