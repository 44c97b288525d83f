"""Medusa heads draft a chain or a tree from one hidden state of the target (arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend
from foredraft.drafters._trees import DraftTree, grow, growing_nodes, trees_for
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

    grows_trees = True

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
                logits = dict(zip(map(id, drafting), self._logits([draft.request for draft in drafting]), strict=True))
                self._write([draft for draft in drafting if draft.request.shape is None], logits, token_probs)
                self._grow(trees_for(drafting), logits)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        """Nothing is held."""

    def _room(self, request: DraftRequest) -> int:
        """Head h drafts the token h places after the pending one; the first heads' places may be forced."""
        num_heads = self._head.config.num_heads - request.num_forced
        if not request.has_all_features or num_heads <= 0:
            return 0
        return request.max_len if request.shape is not None else min(request.max_len, num_heads)

    def _logits(self, requests: Sequence[DraftRequest]) -> Tensor:
        """[len(requests), heads, D]"""
        features = [request.features for request in requests if request.features is not None]
        last = torch.cat([each.since(len(each) - 1) for each in features])
        logits: Tensor = self._head(last.to(self._head.dtype))
        return logits

    def _write(self, drafts: list[Draft], logits: Mapping[int, Tensor], token_probs: list[TokenProbs]) -> None:
        """logits: [heads, D] for each draft, by its identity"""
        while drafts:
            chosen = torch.stack([logits[id(draft)][draft.request.num_forced + len(draft.ids)] for draft in drafts])
            extend(drafts, self._head.on_target(chosen), self._vocab_size, token_probs)
            drafts = [draft for draft in drafts if draft.has_room]

    def _grow(self, trees: Sequence[DraftTree], logits: Mapping[int, Tensor]) -> None:
        """All nodes of a depth have the logits of one head."""
        for depth in range(self._head.config.num_heads):
            growing = [tree for tree in trees if tree.request.num_forced + depth < self._head.config.num_heads]
            places = list(growing_nodes(growing, depth))
            if places:
                rows = [logits[id(tree.draft)][tree.request.num_forced + depth] for tree, _ in places]
                grow(growing, depth, self._head.on_target(torch.stack(rows)), self._vocab_size)
        for tree in trees:
            tree.finish()
