"""Block drafters, which write all draft tokens in one pass over the target's features (DFlash, z-lab, and related heads).

A head with a serial correction takes one more small step per token after the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, is_written, take_generated
from foredraft.drafters._requirements import missing_for
from foredraft.drafters._slots import Slots, draft_slots, num_places
from foredraft.drafters._walks import Walk, draft_walks
from foredraft.drafters.context import DrafterContext
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.heads import BlockReading, Correctable, Correction, DFlashHead
from foredraft.kernels import Chains
from foredraft.sampling import TokenProbs, draft_specs


class DFlashDrafter:
    """Greedy and seeded requests get certain draft tokens, the others sampled ones with their probabilities.

    head: memory for its keys and values is taken from the pool. context_len: the maximum sequence length. max_rows: the maximum of
    one pass. The whole block is read, as in the head's training, however few tokens are requested. A sequence whose history the
    target has not read yet, or that finds no room in the cache, gets no draft tokens.
    """

    grows_trees = True

    def __init__(
        self, head: DFlashHead, vocab_size: int, pool: MemoryPool, context_len: int, max_rows: int = 512
    ) -> None:
        self.taps = head.config.taps
        self._head = head
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._cache = KVCache(pool, head.bytes_per_token, context_len)

    @classmethod
    def build(cls, context: DrafterContext) -> DFlashDrafter:
        if not isinstance(context.head, DFlashHead):
            raise missing_for("dflash")
        return cls(context.head, context.vocab_size, context.pool, context.context_len, context.max_rows)

    @property
    def bytes_held(self) -> int:
        """Bytes of the engine's cache memory."""
        return self._cache.bytes_held

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, self._room(request)) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0 and self._catch_up(draft.request)]
        size = max(1, self._max_rows // self._head.config.block_size)
        for group in (ready[start : start + size] for start in range(0, len(ready), size)):
            with torch.inference_mode():
                self._draft(group, self._read(group), token_probs)
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)

    def _room(self, request: DraftRequest) -> int:
        """How many tokens may be drafted: forced tokens take the first places of a block."""
        left = self._head.config.num_places - request.num_forced
        if not request.has_all_features or left <= 0:
            return 0
        return request.max_len if request.shape is not None else min(request.max_len, left)

    def _catch_up(self, request: DraftRequest) -> bool:
        """Drop rejected tokens from the context, and add accepted ones -> whether there is room"""
        assert request.features is not None
        seq_id, length = request.seq_id, len(request.features)
        self._cache.keep_prefix_of(seq_id, request.tokens, at_most=length)
        if not self._cache.reserve(seq_id, length + self._head.config.block_size):
            self.forget([seq_id])
            return False
        for start in range(self._cache.num_held(seq_id), length, self._max_rows):
            end = min(start + self._max_rows, length)
            features = request.features.since(start)[: end - start]
            self._head.inject(self._cache.region(seq_id), request.tokens[start:end], features)
        return True

    def _read(self, drafts: Sequence[Draft]) -> BlockReading:
        pending = [draft.request.tokens[_anchor(draft)] for draft in drafts]
        return self._head.read([draft.request.seq_id for draft in drafts], pending, self._cache)

    def _draft(self, drafts: Sequence[Draft], reading: BlockReading, token_probs: list[TokenProbs]) -> None:
        correction = self._head.correction
        slots = [Slots(draft, self._rows(place, draft)) for place, draft in enumerate(drafts)]
        if correction is None:
            logits = self._head.on_target(reading.logits.flatten(0, 1))
            draft_slots(slots, logits, self._vocab_size, token_probs)
            return
        self._write([each for each in slots if self._is_written(each.draft)], correction, reading, token_probs)
        slots = [each for each in slots if not self._is_written(each.draft)]
        if slots:
            self._walk(slots, correction, correction.prepare(reading), token_probs)

    def _is_written(self, draft: Draft) -> bool:
        """Whether the compiled kernels write the draft in one call."""
        return self._head.chains is not None and draft.request.shape is None and is_written(draft, adjusts=True)

    def _write(
        self, slots: Sequence[Slots], correction: Correction, reading: BlockReading, token_probs: list[TokenProbs]
    ) -> None:
        """Write each whole chain in one call."""
        if not slots or self._head.chains is None:
            return
        drafts, lens = [each.draft for each in slots], [len(each.rows) for each in slots]
        previous = [self._known(draft, correction)[-1] for draft in drafts]
        chains = Chains([each.rows.start for each in slots], lens, previous)
        specs = draft_specs([draft.row for draft in drafts], lens)
        written = self._head.chains.generate(reading.logits.flatten(0, 1), chains, self._vocab_size, specs)
        take_generated(drafts, written, specs, token_probs)

    def _walk(
        self, slots: Sequence[Slots], correction: Correction, block: Correctable, token_probs: list[TokenProbs]
    ) -> None:
        """Draft in steps: one per token of a chain, one per level of a tree."""

        def step(rows: Tensor, previous: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
            logits, memory = correction(block, rows, previous, memory)
            return self._head.on_target(logits), memory

        draft_walks(self._walks(slots, correction, block), step, self._vocab_size, token_probs)

    def _walks(self, slots: Sequence[Slots], correction: Correction, block: Correctable) -> list[Walk]:
        """Walks that start at the first place of each draft, with the memory of the known tokens before it."""
        memory = correction.empty_memory(len(slots))
        known = [self._known(each.draft, correction) for each in slots]
        for row in range(max(map(len, known)) - 1) if correction.has_memory else ():
            walking = [place for place, tokens in enumerate(known) if row < len(tokens) - 1]
            rows = torch.tensor([place * self._head.config.block_size + row for place in walking], device=memory.device)
            previous = torch.tensor([known[place][row] for place in walking], device=memory.device)
            memory[walking] = correction(block, rows, previous, memory[walking]).memory
        return [
            Walk(each.draft, each.rows, tokens[-1], of_walk)
            for each, tokens, of_walk in zip(slots, known, memory, strict=True)
        ]

    def _known(self, draft: Draft, correction: Correction) -> list[int]:
        """The token before each row of the block, up to the first row that drafts."""
        tokens, anchor = draft.request.tokens, _anchor(draft)
        before = tokens[max(0, anchor - correction.begins_earlier)]
        return [*[before] * self._head.config.first_row, *tokens[anchor:]]

    def _rows(self, place: int, draft: Draft) -> range:
        """The rows of all blocks' logits that belong to the draft with this index."""
        config, num_forced = self._head.config, draft.request.num_forced
        first = place * config.block_size + config.first_row + num_forced
        return range(first, first + min(num_places(draft), config.num_places - num_forced))


def _anchor(draft: Draft) -> int:
    """The position of the pending token, where the block begins."""
    return len(draft.request.tokens) - 1 - draft.request.num_forced
