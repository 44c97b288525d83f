"""Truncated token_probs from the compiled kernels equal those of PyTorch's path and of the dense float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels import load_kernels, why_none
from foredraft.sampling import search, token_probs
from foredraft.sampling.token_probs import truncated
from tests.laws import dense_law

pytestmark = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")

KEEPS: list[dict[str, Any]] = [
    {"top_k": 0, "top_p": 0.9, "min_p": 0.0},
    {"top_k": 20, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.05},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.01},
    {"top_k": 0, "top_p": 0.9999, "min_p": 0.0},
]


def through_torch(logits: Tensor, temperatures: Tensor, keep: dict[str, Any]) -> token_probs.TokenProbs:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_probs, "kernels_for", lambda _: None)
        patch.setattr(search, "load_kernels", lambda: None)
        return truncated(logits, temperatures, **keep)


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([2, 17, 64, 65, 300, 4096, 20_001]),
    keep=st.sampled_from(KEEPS),
    sharpness=st.sampled_from([0.3, 3.0, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_probabilities_are_those_of_the_torch_path(
    width: int, keep: dict[str, Any], sharpness: float, dtype: torch.dtype, seed: int
) -> None:
    """Equal to 1e-6 where the same ids are kept; an id whose probability is at a border may be kept or dropped."""
    generator = torch.Generator().manual_seed(seed)
    logits = (sharpness * torch.randn(3, width, generator=generator)).to(dtype)
    temperatures = torch.tensor([0.5, 1.0, 1.7])
    ours = truncated(logits, temperatures, **keep)
    theirs = through_torch(logits, temperatures, keep)
    a, b = ours.dense(width), theirs.dense(width)
    torch.testing.assert_close(a.sum(-1), torch.ones(3), rtol=0, atol=1e-5)
    differs = (a > 0) ^ (b > 0)
    at_border = torch.where(differs, torch.maximum(a, b), 0)
    assert at_border.max() <= 1e-3
    # one id, or small ones up to the rounding error of a float32 sum over the vocabulary
    assert (at_border.sum(-1) - at_border.amax(-1)).max() <= 1e-5
    a, b = a[~differs.any(-1)], b[~differs.any(-1)]
    assert (a - b).abs().max() <= 1e-6 if a.numel() else True


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_probabilities_are_those_of_dense_float64(keep: dict[str, Any]) -> None:
    logits = 3 * torch.randn(4, 700, generator=torch.Generator().manual_seed(3))
    temperatures = torch.tensor([0.4, 0.8, 1.0, 2.0])
    ours = truncated(logits, temperatures, **keep).dense(700).double()
    for r in range(4):
        expected = dense_law(logits[r].double(), temperature=float(temperatures[r]), **keep)
        differs = (ours[r] > 0) ^ (expected > 0)
        assert differs.sum() <= 1
        assert (ours[r] - expected).abs().max() <= (1e-5 if differs.any() else 1e-6)


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_bfloat16_equals_float32_of_the_same_numbers_and_rows_are_independent(keep: dict[str, Any]) -> None:
    logits = (2 * torch.randn(5, 5000, generator=torch.Generator().manual_seed(4))).bfloat16()
    temperatures = torch.tensor([0.3, 1.0, 1.0, 2.0, 0.7])
    whole = truncated(logits, temperatures, **keep)
    assert torch.equal(truncated(logits.float(), temperatures, **keep).dense(5000), whole.dense(5000))
    for r in range(5):
        alone = truncated(logits[r : r + 1], temperatures[r : r + 1], **keep)
        assert torch.equal(alone.dense(5000)[0], whole.dense(5000)[r])


@pytest.mark.parametrize("keep", KEEPS, ids=str)
@pytest.mark.parametrize("width", [30, 5000])
def test_a_row_with_nan_does_not_affect_others(keep: dict[str, Any], width: int) -> None:
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(5))
    good = truncated(logits, torch.ones(3), **keep).dense(width)
    logits[1, width // 2] = torch.nan
    law = truncated(logits, torch.ones(3), **keep).dense(width)
    assert law[1].isnan().any()
    assert torch.equal(law[[0, 2]], good[[0, 2]])
