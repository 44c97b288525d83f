"""Drafting with the MTP layers of the target's own checkpoint (multi-token prediction, DeepSeek-V3, arXiv:2412.19437)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._autoregressive import AutoregressiveReader
from foredraft.drafters._drafts import Draft, as_proposal, extend
from foredraft.drafters._fused import FusedReader
from foredraft.drafters.context import DrafterContext
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError
from foredraft.heads import MtpHead
from foredraft.model.batch import RaggedBatch, flatten, remember
from foredraft.sampling import TokenProbs


class MtpDrafter(AutoregressiveReader[MtpHead]):
    """One MTP layer drafts token by token, each from the layer's own state of the previous one."""

    @classmethod
    def build(cls, context: DrafterContext) -> MtpDrafter | LayeredMtpDrafter:
        """Build a LayeredMtpDrafter for a head with several layers."""
        head = context.head
        if not isinstance(head, MtpHead):
            raise ForedraftError(
                "method \"mtp\" drafts with the MTP layers that LLM finds in the target's checkpoint: give it the checkpoint's "
                "directory or hub id"
            )
        kind = cls if head.num_layers == 1 else LayeredMtpDrafter
        return kind(head, context.vocab_size, context.pool, context.context_len, context.max_rows)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return self._drafted(requests)


class LayeredMtpDrafter(FusedReader[MtpHead]):
    """Each of several MTP layers drafts one place, so a draft has at most as many tokens as there are layers. Greedy and seeded requests
    get certain draft tokens, the others sampled ones with their probabilities.

    In each row, layer k reads the token k places after the one that layer 0 reads. So its last k rows hold draft tokens, and are read
    again in the next step, with the tokens of the text.
    """

    def __init__(self, head: MtpHead, vocab_size: int, pool: MemoryPool, context_len: int, max_rows: int = 512) -> None:
        super().__init__(head, vocab_size, pool, context_len, max(max_rows, head.num_layers))
        self._num_ahead = head.num_layers - 1

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, self._room(request)) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0 and self._has_room(draft)]
        with torch.inference_mode():
            for group in self._passes(ready):
                self._draft(group, token_probs)
        return as_proposal(drafts, token_probs)

    def _room(self, request: DraftRequest) -> int:
        """The maximum draft length: forced tokens take the places of the first layers."""
        return min(request.max_len, self._head.num_layers - request.num_forced) if request.has_all_features else 0

    def _read_before(self, draft: Draft) -> None:
        """Read at most max_rows rows, and none in which a layer would need a token past the history."""
        self._draft([draft], [], at_most=min(self._max_rows, self._num_unread(draft) - self._num_ahead))

    def _draft(self, drafts: Sequence[Draft], token_probs: list[TokenProbs], at_most: int | None = None) -> None:
        """Read the unread tokens with every layer, and let each draft the token of its place. at_most: read only so many rows, and
        draft nothing."""
        reads, states = self._fused(drafts, at_most)
        batch = flatten(reads, self._cache)
        for layer in range(self._head.num_layers):
            states = self._head.run(layer, _further(batch, drafts, layer), states)
            if at_most is None:
                self._choose(layer, drafts, states[batch.wanted], token_probs)
        remember(reads, batch)

    def _choose(self, place: int, drafts: Sequence[Draft], states: Tensor, token_probs: list[TokenProbs]) -> None:
        """Draft the token of this place. states: [len(drafts), H]"""
        rows = [row for row, draft in enumerate(drafts) if draft.has_room and place >= draft.request.num_forced]
        if rows:
            logits = self._head.on_target(self._head.logits(states[rows]))
            extend([drafts[row] for row in rows], logits, self._vocab_size, token_probs)


def _further(batch: RaggedBatch, drafts: Sequence[Draft], places: int) -> RaggedBatch:
    """The same rows with the tokens so many places further on. Rows past the draft hold arbitrary tokens, and are read again."""
    ids: list[int] = []
    for span, draft in zip(batch.spans, drafts, strict=True):
        known = [*draft.request.tokens[span.start + 1 + places :], *draft.ids][: span.num_rows]
        ids += known + [0] * (span.num_rows - len(known))
    return batch._replace(ids=ids)
