"""Medusa heads draft a chain from one hidden state of the target (arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError
from foredraft.heads import MedusaHead
from foredraft.sampling import TokenProbs


class MedusaDrafter:
    """One pass over a row for each sequence gives all its draft tokens. Greedy and seeded requests get certain drafts, the others
    sampled ones with their probabilities. Nothing is kept from step to step.

    A sequence whose history the target has not read yet gets a proposal of zero.
    """

    def __init__(self, head: MedusaHead, vocab_size: int) -> None:
        self.taps = head.config.taps
        self._head = head
        self._vocab_size = vocab_size

    @classmethod
    def build(cls, context: DrafterContext) -> MedusaDrafter:
        if not isinstance(context.head, MedusaHead):
            raise ForedraftError('method "medusa" needs Medusa heads: give draft_model= their directory or hub id')
        return cls(context.head, context.vocab_size)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, self._room(request)) for request in requests]
        token_probs: list[TokenProbs] = []
        drafting = [draft for draft in drafts if draft.max_len > 0]
        if drafting:
            with torch.inference_mode():
                self._write(drafting, self._logits([draft.request for draft in drafting]), token_probs)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        """Nothing is held."""

    def _room(self, request: DraftRequest) -> int:
        """Head h drafts the token h places after the pending one; the first heads' places may be forced."""
        num_heads = self._head.config.num_heads - request.num_forced
        return max(0, min(request.max_len, num_heads)) if request.has_all_features else 0

    def _logits(self, requests: Sequence[DraftRequest]) -> Tensor:
        """[len(requests), heads, D]"""
        features = [request.features for request in requests if request.features is not None]
        last = torch.cat([each.since(len(each) - 1) for each in features])
        logits: Tensor = self._head(last.to(self._head.dtype))
        return logits

    def _write(self, drafts: list[Draft], logits: Tensor, token_probs: list[TokenProbs]) -> None:
        rows = {id(draft): row for row, draft in enumerate(drafts)}
        while drafts:
            places = [(rows[id(draft)], draft.request.num_forced + len(draft.ids)) for draft in drafts]
            chosen = torch.stack([logits[place] for place in places])
            extend(drafts, self._head.on_target(chosen), self._vocab_size, token_probs)
            drafts = [draft for draft in drafts if draft.has_room]
