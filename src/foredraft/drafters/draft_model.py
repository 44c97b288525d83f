"""A small language model that drafts for the whole batch at once, with its own KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend, is_written, take_generated
from foredraft.drafters._histories import HistoryReader
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._trees import DraftTree, grow_at_once, grow_over, split_trees, trees_for
from foredraft.drafters._vocabulary import SharedVocabulary
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DeviceDraft, DraftRequest, PendingProposal, Proposal
from foredraft.engine.token_tree import TreeShape
from foredraft.kernels import DrawSpec
from foredraft.model import Read
from foredraft.model.generation import Generation
from foredraft.model.placeholders import placeholders
from foredraft.sampling import Pending, TokenProbs, draft_specs


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
            raise missing_for("draft_model")
        vocabulary = None if pair is None else SharedVocabulary(pair, model.traits.vocab_size, context.vocab_size)
        return cls(model, context.vocab_size, context.pool, context.max_rows, vocabulary)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return self._launched(requests).resolve()

    def begin(self, requests: list[DraftRequest]) -> Pending[Proposal]:
        """See Drafter. Starts now if the model is on a device, which works meanwhile."""
        return self._launched(requests) if self._model.runs_ahead else Pending([], lambda _: self.propose(requests))

    def _launched(self, requests: list[DraftRequest]) -> PendingProposal:
        """Start to write all chains that the model can write in one call. Other drafts are made when the result is resolved."""
        drafts = [self._draft_for(request) for request in requests]
        ready = self._catch_up([draft for draft in drafts if draft.max_len > 0])
        chains = [draft for draft in ready if draft.request.shape is None]
        written = [draft for draft in chains if self._is_written(draft)]
        batches = [self._launch(group) for group in self._passes(written)]

        def finish() -> Proposal:
            token_probs: list[TokenProbs] = []
            for batch in batches:
                take_generated(batch.drafts, batch.generation.result.resolve(), batch.specs, token_probs)
            self._sample_all([draft for draft in chains if not self._is_written(draft)], token_probs)
            self._grow(trees_for(ready))
            return as_proposal(drafts, token_probs)

        is_one_batch = len(batches) == 1 and len(written) == len(ready)
        return PendingProposal(finish, _device_draft(drafts, batches[0]) if is_one_batch else None)

    def _is_written(self, draft: Draft) -> bool:
        return is_written(draft, adjusts=self._model.can_adjust) and self._vocabulary.is_the_targets

    def _launch(self, group: list[Draft]) -> _Batch:
        """Draft each chain in one call of the model, which ignores constraints. They are applied afterwards: a draft ends at the first
        token that breaks one."""
        lens = [draft.max_len for draft in group]
        specs = draft_specs([draft.row for draft in group], lens)
        reads = [self._rest(draft) for draft in group]
        return _Batch(group, specs, self._model.launch_generation(reads, lens, self._vocab_size, self._cache, specs))

    def _sample_all(self, open_drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        logits = self._read_rests(open_drafts) if open_drafts else None
        while open_drafts:
            assert logits is not None
            extend(open_drafts, self._vocabulary.to_target(logits), self._vocab_size, token_probs)
            open_drafts = [draft for draft in open_drafts if draft.has_room]
            reads = [Read(d.request.seq_id, self._vocabulary.to_draft(d.ids[-1:]), 1) for d in open_drafts]
            logits = self._model.read(reads, self._cache) if reads else None

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        at_once, others = split_trees(trees, lambda draft: self._model.can_grow and self._is_written(draft))
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


class _Batch(NamedTuple):
    """Chains that the model writes in one call. specs: how it chooses their tokens."""

    drafts: list[Draft]
    specs: Sequence[DrawSpec]
    generation: Generation


def _device_draft(drafts: Sequence[Draft], batch: _Batch) -> DeviceDraft | None:
    """The chains while a device still writes them; None if nothing is under way. drafts: a row for each."""
    ids = batch.generation.ids
    if ids is None:
        return None
    columns = {id(draft): column for column, draft in enumerate(batch.drafts)}
    num_columns = ids.on_device.shape[1]
    rows = [
        placeholders(draft.max_len, columns[id(draft)], num_columns) if id(draft) in columns else [] for draft in drafts
    ]
    return DeviceDraft(ids, rows)
