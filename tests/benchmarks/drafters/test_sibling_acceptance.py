"""Rules for choosing children, on distributions whose acceptance is known."""

from __future__ import annotations

import pytest
import torch

from benchmarks.drafters.sibling_acceptance import ratio, rejection, shared_noise, top_k

RULES = (shared_noise, rejection, top_k)
NUM_DRAWS = 40_000
TOLERANCE = 0.02  # eight standard deviations of a share of 40,000 draws


def repeated(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).expand(NUM_DRAWS, -1).contiguous()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_a_token_from_the_same_distribution_is_accepted() -> None:
    p = repeated(0.5, 0.3, 0.2)
    assert ratio(p, p) == pytest.approx(1.0)
    assert shared_noise(p, p, 1) == rejection(p, p, 1) == 1.0
    assert top_k(p, p, 1) == pytest.approx(0.5)


@pytest.mark.parametrize("rule", RULES)
def test_all_tokens_together_are_always_accepted(rule: type) -> None:
    assert rule(repeated(0.5, 0.3, 0.2), repeated(0.1, 0.2, 0.7), 3) == pytest.approx(1.0)


def test_rejection_of_a_single_draft_accepts_with_p_over_q() -> None:
    p, q = repeated(0.5, 0.3, 0.2), repeated(0.1, 0.2, 0.7)
    assert rejection(p, q, 1) == pytest.approx(ratio(p, q), abs=TOLERANCE)


def test_rejection_of_two_drafts_by_hand() -> None:
    """The first draft is accepted with probability 0.5. After a rejected third token p is 0.8, 0.2, 0 and q is 1/3, 2/3, 0, so the second
    draft is accepted with probability 1/3 + 0.2. Nothing else is rejected."""
    p, q = repeated(0.5, 0.3, 0.2), repeated(0.1, 0.2, 0.7)
    assert rejection(p, q, 2) == pytest.approx(0.5 + 0.5 * (1 / 3 + 0.2), abs=TOLERANCE)


def test_the_likeliest_tokens_are_accepted_with_their_probability() -> None:
    assert top_k(repeated(0.5, 0.3, 0.2), repeated(0.1, 0.2, 0.7), 2) == pytest.approx(0.5)


def test_shared_noise_accepts_less_alone_and_more_with_siblings() -> None:
    p, q = repeated(0.5, 0.3, 0.2), repeated(0.1, 0.2, 0.7)
    assert shared_noise(p, q, 1) < ratio(p, q) + TOLERANCE
    assert shared_noise(p, q, 2) > shared_noise(p, q, 1) + TOLERANCE
