"""The target's first layers draft, over the target's own keys and values (LayerSkip, arXiv:2404.16710).

The keys and values of a draft token in these layers are written after those of the history. They equal the target's own, but the
target's pass writes them again anyway, so no text depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.drafters._drafts import Draft, as_proposal, extend, is_written, take_generated
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._trees import DraftTree, grow_at_once, grow_over, split_trees, trees_for
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.region import Region
from foredraft.engine.token_tree import TreeShape
from foredraft.heads import EarlyExit
from foredraft.kernels import DrawSpec
from foredraft.model import Read
from foredraft.sampling import TokenProbs, draft_specs


class EarlyExitDrafter:
    """Greedy and seeded requests get certain draft tokens, the others sampled ones with their probabilities. Nothing is kept from
    step to step.

    A sequence whose history the target has not read yet gets no draft tokens.
    """

    shares_cache = True
    grows_trees = True

    def __init__(self, exit: EarlyExit, vocab_size: int) -> None:
        self._model = exit.model
        self._vocab_size = vocab_size

    @classmethod
    def build(cls, context: DrafterContext) -> EarlyExitDrafter:
        if not isinstance(context.head, EarlyExit):
            raise missing_for("early_exit")
        return cls(context.head, context.vocab_size)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, request.max_len if request.has_all_keys else 0) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0]
        regions = _Regions(ready)
        chains = [draft for draft in ready if draft.request.shape is None]
        self._write([draft for draft in chains if self._is_written(draft)], regions, token_probs)
        self._extend_all([draft for draft in chains if not self._is_written(draft)], regions, token_probs)
        self._grow(trees_for(ready), regions)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        """There is nothing to release."""

    def _is_written(self, draft: Draft) -> bool:
        return is_written(draft, adjusts=self._model.can_adjust)

    def _write(self, drafts: Sequence[Draft], regions: _Regions, token_probs: list[TokenProbs]) -> None:
        """Write each whole draft in one call, if the target's body can do that."""
        if not drafts:
            return
        lens = [draft.max_len for draft in drafts]
        specs = draft_specs([draft.row for draft in drafts], lens)
        reads = [regions.rest_of(draft) for draft in drafts]
        written = self._model.generate(reads, lens, self._vocab_size, regions, specs)
        take_generated(drafts, written, specs, token_probs)

    def _extend_all(self, drafts: Sequence[Draft], regions: _Regions, token_probs: list[TokenProbs]) -> None:
        """Draft chains, one pass per token."""
        reads = [regions.rest_of(draft) for draft in drafts]
        while drafts:
            extend(drafts, self._model.read(reads, regions), self._vocab_size, token_probs)
            drafts = [draft for draft in drafts if draft.has_room]
            reads = [Read(draft.request.seq_id, draft.ids[-1:], 1) for draft in drafts]

    def _grow(self, trees: Sequence[DraftTree], regions: _Regions) -> None:
        def grow_pass(
            drafts: Sequence[Draft], shapes: Sequence[TreeShape], specs: Sequence[DrawSpec]
        ) -> list[list[int]]:
            reads = [regions.rest_of(draft) for draft in drafts]
            return self._model.grow(reads, shapes, self._vocab_size, regions, specs)

        at_once, others = split_trees(trees, lambda draft: self._model.can_grow and self._is_written(draft))
        grow_at_once(at_once, lambda drafts: [list(drafts)], grow_pass)
        if others:
            logits = self._model.read([regions.rest_of(tree.draft) for tree in others], regions)
            grow_over(self._model, regions, others, logits, self._vocab_size)


class _Regions:
    """The views of the target's cache that the requests carry."""

    taps = ()

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self._regions = {draft.request.seq_id: draft.request.region for draft in drafts}

    def region(self, seq_id: int) -> Region:
        region = self._regions[seq_id]
        assert region is not None
        return region

    def rest_of(self, draft: Draft) -> Read:
        """The pending token and the forced tokens."""
        request = draft.request
        return Read(request.seq_id, request.tokens[len(self.region(request.seq_id).tokens) :], 1)
