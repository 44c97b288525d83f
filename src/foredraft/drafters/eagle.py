"""EAGLE heads draft autoregressively from hidden states of the target (arXiv:2401.15077, arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.drafters._autoregressive import AutoregressiveReader
from foredraft.drafters._drafts import Draft, is_written, take_generated
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._trees import DraftTree, grow_at_once, split_trees
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.token_tree import TreeShape
from foredraft.heads import CompiledEagle, EagleHead
from foredraft.kernels import DrawSpec
from foredraft.sampling import TokenProbs, draft_specs


class EagleDrafter(AutoregressiveReader[EagleHead | CompiledEagle]):
    """Drafts with an EAGLE head. If the compiled kernels run it, they write a whole draft in one call."""

    @classmethod
    def build(cls, context: DrafterContext) -> EagleDrafter:
        if not isinstance(context.head, EagleHead | CompiledEagle):
            raise missing_for("eagle")
        return cls(context.head, context.vocab_size, context.pool, context.context_len, context.max_rows)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return self._drafted(requests)

    def _draft_chains(self, drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        self._write([draft for draft in drafts if self._is_written(draft)], token_probs)
        self._extend_all([draft for draft in drafts if not self._is_written(draft)], token_probs)

    def _is_written(self, draft: Draft) -> bool:
        """Whether the head writes the draft in one call."""
        return (
            isinstance(self._head, CompiledEagle) and draft.request.num_forced == 0 and is_written(draft, adjusts=True)
        )

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        at_once, others = split_trees(trees, self._is_written)
        grow_at_once(at_once, self._passes, self._grow_pass)
        super()._grow(others)

    def _grow_pass(
        self, drafts: Sequence[Draft], shapes: Sequence[TreeShape], specs: Sequence[DrawSpec]
    ) -> list[list[int]]:
        assert isinstance(self._head, CompiledEagle)
        return self._head.grow(*self._unread(drafts), shapes, self._vocab_size, self._cache, specs)

    def _write(self, drafts: Sequence[Draft], token_probs: list[TokenProbs]) -> None:
        """Write each whole draft in one call."""
        head = self._head
        assert not drafts or isinstance(head, CompiledEagle)
        for group in self._passes(drafts):
            lens = [draft.max_len for draft in group]
            specs = draft_specs([draft.row for draft in group], lens)
            reads, features = self._unread(group)
            written = head.generate(reads, features, lens, self._vocab_size, self._cache, specs)  # type: ignore[operator]
            take_generated(group, written, specs, token_probs)
