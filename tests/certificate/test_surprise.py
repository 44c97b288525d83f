"""Surprise, the centred and bounded negative log-probability, is fair to bet on."""

from __future__ import annotations

import pytest
import torch

from foredraft.certificate.surprise import centred_surprise, surprise, surprise_of_drawn
from foredraft.sampling import TokenProbs

LAWS = torch.tensor([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)


def test_surprise_is_minus_the_logarithm_up_to_a_bound() -> None:
    assert surprise(torch.tensor([1.0, torch.tensor(-8.0).exp(), 0.0])).tolist() == pytest.approx([0, 0.5, 1])


def test_the_mean_of_centred_surprise_is_zero() -> None:
    for law in LAWS:
        assert float((law * centred_surprise(law)).sum()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kept_ids", [None, torch.tensor([[7, 3, 9, 0], [3, 0, 0, 0], [5, 6, 7, 8]])])
def test_the_surprise_of_drawn_tokens_is_that_of_their_distribution(kept_ids: torch.Tensor | None) -> None:
    ids = torch.arange(4).expand(3, 4) if kept_ids is None else kept_ids
    rows, columns = LAWS.nonzero().T
    found = surprise_of_drawn(TokenProbs(LAWS, kept_ids), rows, ids[rows, columns])
    expected = torch.stack([centred_surprise(law) for law in LAWS])[rows, columns]
    torch.testing.assert_close(found, expected)


def test_a_large_vocabulary_is_processed_in_parts() -> None:
    probs = torch.rand(5, 1 << 19, dtype=torch.float32)
    probs /= probs.sum(1, keepdim=True)
    ids = torch.tensor([3, 1, 4, 1, 5])
    found = surprise_of_drawn(TokenProbs(probs), torch.arange(5), ids)
    expected = torch.stack([centred_surprise(law.double())[token] for law, token in zip(probs, ids, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
