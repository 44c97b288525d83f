"""Proposals, and proposals merged from several: every id keeps the distribution it was drawn from."""

from __future__ import annotations

import pytest
import torch

from foredraft.engine.proposal import CERTAIN, Proposal
from foredraft.sampling import TokenProbs


def test_merged_tokens_keep_truncated_and_full_distributions() -> None:
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


def test_merging_no_proposals_gives_empty_drafts() -> None:
    merged = Proposal.merged([], 3)
    assert merged.is_certain
    assert merged.lens.tolist() == [0, 0, 0]
    assert merged.token_probs is None


def test_a_merged_proposal_is_certain_where_all_its_parts_are() -> None:
    certain = Proposal.certain([[1, 2]], [[-1, -1]])
    drawn = Proposal.of([[4]], [[0]], TokenProbs(torch.ones(1, 5) / 5))
    both = Proposal.merged([([0], certain), ([2], Proposal.certain([[3]]))], 3)
    assert both.is_certain
    assert (both.draft_ids, both.parents) == ([[1, 2], [], [3]], [[-1, -1], None, None])
    assert both.draft_prob_rows == [[-1, -1], [], [-1]]
    mixed = Proposal.merged([([0], certain), ([2], drawn)], 3)
    assert not mixed.is_certain
    assert mixed.draft_prob_rows == [[-1, -1], [], [0]]


def test_proposals_from_tensors_and_lists_are_equal() -> None:
    ids, prob_rows, laws = [[4, 1], [], [2]], [[0, CERTAIN], [], [1]], TokenProbs(torch.eye(5)[[4, 2]])
    of_lists = Proposal.of(ids, prob_rows, laws)
    of_tensors = Proposal(of_lists.ids, of_lists.lens, of_lists.prob_rows, laws.probs)
    for proposal in (of_lists, of_tensors, of_tensors.reread()):
        assert (proposal.num_rows, proposal.draft_ids, proposal.draft_prob_rows) == (3, ids, prob_rows)
        assert proposal.ids[proposal.drafted].tolist() == [4, 1, 2]
        assert proposal.prob_rows[proposal.drafted].tolist() == [0, CERTAIN, 1]
        assert not proposal.is_certain
    certain = Proposal.certain(ids)
    assert certain.is_certain
    assert certain.draft_prob_rows == [[CERTAIN, CERTAIN], [], [CERTAIN]]
    assert certain.prob_rows.tolist() == [[CERTAIN, CERTAIN]] * 3


def test_tokens_in_lists_become_integers_or_are_refused() -> None:
    proposal = Proposal.certain([torch.tensor([3, 1]), range(2)])  # type: ignore[list-item]
    assert [[type(token) for token in row] for row in proposal.draft_ids] == [[int, int]] * 2
    with pytest.raises(TypeError):
        Proposal.certain([[1.5]])  # type: ignore[list-item]


def test_inconsistent_shapes_are_refused() -> None:
    for make in (
        lambda: Proposal.of([[1, 2]], [[0]]),
        lambda: Proposal.certain([[1, 2]], [[-1]]),
        lambda: Proposal(torch.zeros(1, 2).long(), torch.tensor([3]), torch.zeros(1, 2).long()),
        lambda: Proposal(torch.zeros(1, 2).long(), torch.tensor([2, 1]), torch.zeros(1, 2).long()),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            make()
