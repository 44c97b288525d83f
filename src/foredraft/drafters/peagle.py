"""An EAGLE head that drafts all tokens in one pass (P-EAGLE, arXiv:2602.01469).

After the rows that have the target's features it reads rows of a mask token with one learned feature. The last row with features
gives the first draft token, as in any EAGLE head, and the i-th mask row gives the token after i others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal
from foredraft.drafters._fused import FusedReader
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._slots import draft_slots, num_places, slots_of
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.heads import CompiledEagle, EagleHead
from foredraft.model import Read
from foredraft.sampling import TokenProbs


class PEagleDrafter(FusedReader[EagleHead | CompiledEagle]):
    """Greedy and seeded requests get certain draft tokens, the others sampled ones with their probabilities."""

    grows_trees = True

    @classmethod
    def build(cls, context: DrafterContext) -> PEagleDrafter:
        if not isinstance(context.head, EagleHead | CompiledEagle) or context.head.config.mask_token is None:
            raise missing_for("peagle")
        return cls(context.head, context.vocab_size, context.pool, context.context_len, context.max_rows)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, request.max_len if request.has_all_features else 0) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0 and self._has_room(draft)]
        with torch.inference_mode():
            for group in self._passes(ready):
                slots = slots_of(group, [draft.request.num_forced for draft in group])
                draft_slots(slots, self._logits(group), self._vocab_size, token_probs)
        return as_proposal(drafts, token_probs)

    def _logits(self, drafts: Sequence[Draft]) -> Tensor:
        """[R, V], a row for each place of these drafts, forced ones included"""
        mask_token, mask = self._head.config.mask_token, self._head.mask_state
        assert mask_token is not None
        fused, states_of_fused = self._fused(drafts)
        reads, states = [], []
        rows = torch.split(states_of_fused, [len(read.tokens) for read in fused])
        for draft, read, own in zip(drafts, fused, rows, strict=True):
            count = _num_read(draft)
            reads.append(Read(read.seq_id, [*read.tokens, *[mask_token] * (count - 1)], count))
            states += [own, mask.expand(count - 1, -1)]
        return self._head.on_target(self._head.read(reads, torch.cat(states), self._cache).logits)

    def _num_rows(self, draft: Draft) -> int:
        return super()._num_rows(draft) + _num_read(draft) - 1


def _num_read(draft: Draft) -> int:
    """The places after the pending token. Forced tokens count: they are masked too, since the target has no features there."""
    return draft.request.num_forced + num_places(draft)
