"""A small language model that drafts for the whole batch at once, with its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend, is_written, take_generated
from foredraft.drafters._histories import HistoryReader
from foredraft.drafters._trees import DraftTree, grow_at_once, grow_over, split_trees, trees_for
from foredraft.drafters._vocabulary import SharedVocabulary
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.kernels import DrawSpec
from foredraft.model import Read
from foredraft.sampling import (
    TokenProbs,
    draw_specs,
)


class DraftModelDrafter(HistoryReader):
    """Classic speculative decoding with a draft model (arXiv:2211.17192). Greedy and seeded requests get certain draft tokens (given
    the history and the shared noise, nothing in them is random), the others sampled ones with their probabilities.

    A model whose vocabulary differs from the target's drafts chains only, one pass per token. An encoder-decoder reads the target's
    source with its own encoder.
    """

    @property
    def grows_trees(self) -> bool:
        return self._vocabulary.is_the_targets

    @classmethod
    def build(cls, context: DrafterContext) -> DraftModelDrafter:
        model, pair = context.draft_model, context.vocabularies
        if model is None:
            raise ForedraftError('method "draft_model" needs a draft model: give draft_model=')
        vocabulary = None if pair is None else SharedVocabulary(pair, model.traits.vocab_size, context.vocab_size)
        return cls(model, context.vocab_size, context.pool, context.max_rows, vocabulary)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [self._draft_for(request) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = self._catch_up([draft for draft in drafts if draft.max_len > 0])
        chains = [draft for draft in ready if draft.request.shape is None]
        self._write([draft for draft in chains if self._is_written(draft)], token_probs)
        self._sample_all([draft for draft in chains if not self._is_written(draft)], token_probs)
        self._grow(trees_for(ready))
        return as_proposal(drafts, token_probs)

    def _is_written(self, draft: Draft) -> bool:
        return is_written(draft) and self._vocabulary.is_the_targets

    def _write(self, drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        """Draft each chain in one call of the model, which ignores constraints. They are applied afterwards: a draft ends at the first
        token that breaks one."""
        for group in self._passes(drafts):
            lens = [draft.max_len for draft in group]
            specs = draw_specs([draft.row for draft in group], lens)
            reads = [self._rest(draft) for draft in group]
            written = self._model.generate(reads, lens, self._vocab_size, self._cache, specs)
            take_generated(group, written, specs, token_probs)

    def _sample_all(self, open_drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        logits = self._read_rests(open_drafts) if open_drafts else None
        while open_drafts:
            assert logits is not None
            extend(open_drafts, self._vocabulary.to_target(logits), self._vocab_size, token_probs)
            open_drafts = [draft for draft in open_drafts if draft.has_room]
            reads = [Read(d.request.seq_id, self._vocabulary.to_draft(d.ids[-1:]), 1) for d in open_drafts]
            logits = self._model.read(reads, self._cache) if reads else None

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        at_once, others = split_trees(trees, lambda _: self._model.can_grow)
        grow_at_once(at_once, self._passes, self._grow_pass)
        if others:
            grow_over(self._model, self._cache, others, self._read_rests([t.draft for t in others]), self._vocab_size)

    def _grow_pass(
        self, drafts: Sequence[Draft], shapes: Sequence[TreeShape], specs: Sequence[DrawSpec]
    ) -> list[list[int]]:
        reads = [self._rest(draft) for draft in drafts]
        return self._model.grow(reads, shapes, self._vocab_size, self._cache, specs)

    def _read_rests(self, drafts: list[Draft]) -> Tensor:
        """[len(drafts), V'], the logits after each request's tokens"""
        passes = (self._model.read([self._rest(d) for d in group], self._cache) for group in self._passes(drafts))
        return torch.cat(list(passes))
