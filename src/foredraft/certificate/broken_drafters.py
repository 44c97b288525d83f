"""Broken drafters: real drafters with one mistake each. Their draft tokens are those of the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from foredraft.drafters import CombinedDrafter
from foredraft.engine.proposal import (
    CERTAIN,
    Drafter,
    DraftRequest,
    Features,
    Proposal,
    bytes_held,
    grows_trees,
    taps_of,
)
from foredraft.sampling import TokenProbs, joined


def with_features_one_off(drafter: Drafter) -> Drafter:
    """See FeaturesOneOff; a drafter that reads no hidden states stays as it is, and one that combines others has these broken."""
    if isinstance(drafter, CombinedDrafter):
        return drafter.with_parts(with_features_one_off)
    return FeaturesOneOff(drafter) if taps_of(drafter) else drafter


class FeaturesOneOff:
    """Draws its tokens from the right distributions, but reports those it would get with every token of the history paired with
    the target's hidden states of the previous token.

    head: a drafter that reads hidden states. It reads each text a second time, under another id, with the shifted states.
    """

    def __init__(self, head: Drafter) -> None:
        self._head = head
        self.taps = taps_of(head)
        self.grows_trees = grows_trees(head)

    @property
    def bytes_held(self) -> int:
        return bytes_held(self._head)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        proposal = self._head.propose(requests)
        if proposal.token_probs is None:
            return proposal
        parts, prob_rows = [_copied(proposal.token_probs)], [list(rows) for rows in proposal.draft_prob_rows]
        for place in range(proposal.ids.shape[1]):
            for b, probs in self._probs_one_off(requests, proposal, place).items():
                prob_rows[b][place] = sum(len(part.probs) for part in parts)
                parts.append(probs)
        return Proposal.of(proposal.draft_ids, prob_rows, joined(parts), proposal.parents)

    def forget(self, seq_ids: list[int]) -> None:
        self._head.forget([*seq_ids, *map(_other_id, seq_ids)])

    def _probs_one_off(self, requests: Sequence[DraftRequest], proposal: Proposal, place: int) -> dict[int, TokenProbs]:
        """By row: the distribution reported for its draft token at this place, if that token was drawn. The engine would refuse a
        distribution that gives the token no probability, so the right one is kept there."""
        ids = proposal.draft_ids
        drawn = [b for b, rows in enumerate(proposal.draft_prob_rows) if len(rows) > place and rows[place] != CERTAIN]
        if not drawn:
            return {}
        answer = self._head.propose([_one_off(requests[b], ids[b][:place]) for b in drawn])
        probs = {
            b: _copied(answer.token_probs, rows[0])
            for b, rows in zip(drawn, answer.draft_prob_rows, strict=True)
            if rows
        }
        return {b: each for b, each in probs.items() if _allows(each, ids[b][place])}


def _copied(token_probs: TokenProbs | None, row: int | None = None) -> TokenProbs:
    """A copy of all rows or of one, because a drafter may reuse their memory for its next answer."""
    assert token_probs is not None
    rows = slice(None) if row is None else slice(row, row + 1)
    return TokenProbs(
        token_probs.probs[rows].clone(), None if token_probs.ids is None else token_probs.ids[rows].clone()
    )


def _allows(probs: TokenProbs, token: int) -> bool:
    """probs: one distribution."""
    device = probs.probs.device
    column = torch.tensor([[token]], device=device)
    return bool(probs.at(torch.zeros(1, dtype=torch.int64, device=device), column) > 0)


def _other_id(seq_id: int) -> int:
    """An id that no sequence has."""
    return -1 - seq_id


def _one_off(request: DraftRequest, drafted: Sequence[int]) -> DraftRequest:
    """A request for one more token after the drafted ones, which count as forced: the head reads them with its own states."""
    assert request.features is not None
    columns, rows = request.features.columns, replace(request.features, columns=None).since(0)
    return replace(
        request,
        seq_id=_other_id(request.seq_id),
        tokens=[*request.tokens, *drafted],
        max_len=1,
        features=Features(torch.cat([rows[:1], rows[:-1]]), columns),
        num_forced=request.num_forced + len(drafted),
    )
