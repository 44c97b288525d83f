"""Medusa heads, which draft a chain or a tree from one hidden state of the target (arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._slots import Slots, draft_slots
from foredraft.drafters._state_refit import StateRefit
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.refit_schedule import RefitSchedule
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.heads import MedusaHead
from foredraft.sampling import TokenProbs


class MedusaDrafter:
    """One pass over one row per sequence gives all its draft tokens. Greedy and seeded requests get certain draft tokens, the others
    sampled ones with their probabilities. Nothing is kept from step to step, except what an adaptive drafter has learned.

    refits: when it learns from the texts; None: it does not adapt. A sequence whose history the target has not read yet gets no
    draft tokens.
    """

    grows_trees = True

    def __init__(self, head: MedusaHead, vocab_size: int, refits: RefitSchedule | None = None) -> None:
        self.taps = head.config.taps
        self.refits = refits
        self._head = head
        self._vocab_size = vocab_size
        self._refit = None if refits is None else StateRefit(head, refits)

    @classmethod
    def build(cls, context: DrafterContext) -> MedusaDrafter:
        if not isinstance(context.head, MedusaHead):
            raise missing_for("medusa")
        return cls(context.head, context.vocab_size, context.refits)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, self._room(request)) for request in requests]
        token_probs: list[TokenProbs] = []
        drafting = [draft for draft in drafts if draft.max_len > 0]
        if drafting:
            with torch.inference_mode():
                logits = self._logits([draft.request for draft in drafting])
                slots = [Slots(draft, self._rows(place, draft)) for place, draft in enumerate(drafting)]
                draft_slots(slots, logits, self._vocab_size, token_probs)
            if self._refit is not None:
                self._refit.remember(drafting)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        if self._refit is not None:
            self._refit.forget(seq_ids)

    def _room(self, request: DraftRequest) -> int:
        """How many tokens may be drafted: one per head, and forced tokens take the places of the first heads."""
        num_heads = self._head.config.num_heads - request.num_forced
        if not request.has_all_features or num_heads <= 0:
            return 0
        return request.max_len if request.shape is not None else min(request.max_len, num_heads)

    def _logits(self, requests: Sequence[DraftRequest]) -> Tensor:
        """[len(requests) * heads, V]"""
        features = [request.features for request in requests if request.features is not None]
        last = torch.cat([each.since(len(each) - 1) for each in features])
        return self._head.on_target(self._head.logits_of(self._states(requests, last)).flatten(0, 1))

    def _states(self, requests: Sequence[DraftRequest], last: Tensor) -> Tensor:
        """The inputs of the lm_heads, after learning if that is due. last: [len(requests), H] -> [len(requests), heads, H]"""
        if self._refit is None:
            return self._head.states(last.to(self._head.dtype))
        return self._refit.states(requests, last)

    def _rows(self, place: int, draft: Draft) -> range:
        """The rows of `_logits` that belong to the draft with this index."""
        num_heads, num_forced = self._head.config.num_heads, draft.request.num_forced
        first = place * num_heads + num_forced
        return range(first, first + min(draft.max_len, num_heads - num_forced))
