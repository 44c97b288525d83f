"""One proposal of several: every id keeps the law it was drawn from."""

from __future__ import annotations

import torch

from foredraft.engine.proposal import Proposal
from foredraft.sampling import TokenProbs


def test_laws_of_few_ids_and_of_all_stay_with_their_tokens() -> None:
    kept = TokenProbs(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[1, 3], [2, 0]]))
    whole = TokenProbs(torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6]]))
    parts = [([1], Proposal.of([[1, 2]], [[0, 1]], kept)), ([0, 2], Proposal.of([[4], []], [[0], []], whole))]
    for order in (parts, parts[::-1]):
        merged = Proposal.merged(order, 4)
        assert merged.lens.tolist() == [1, 2, 0, 0]
        assert merged.ids[merged.drafted].tolist() == [4, 1, 2]
        assert merged.token_probs is not None
        named = merged.token_probs.dense(5)[merged.prob_rows[merged.drafted]]
        assert torch.equal(named, torch.cat([whole.dense(5), kept.dense(5)]))


def test_nobody_answers() -> None:
    merged = Proposal.merged([], 3)
    assert merged.lens.tolist() == [0, 0, 0]
    assert merged.token_probs is None
