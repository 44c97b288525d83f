"""No drafting: a step with zero draft tokens is plain decoding."""

from __future__ import annotations

from foredraft.engine.proposal import DraftRequest, Proposal


class NoDrafter:
    """Proposes nothing for any request."""

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> B rows of length 0, K = 0"""
        return Proposal.certain([()] * len(requests))

    def forget(self, seq_ids: list[int]) -> None:
        """There is nothing to release."""
