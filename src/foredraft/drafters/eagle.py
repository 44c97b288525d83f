"""EAGLE heads draft autoregressively from hidden states of the target (arXiv:2401.15077, arXiv:2503.01840).

A head's row P pairs the token at P + 1 with the target's features of P. Rows of draft tokens have the head's own state in their
place, and are read anew with the target's features once they stand: so the head never goes on from its own guesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend, is_written, take_generated
from foredraft.drafters._trees import DraftTree, grow_all, inner_nodes, last_level, read_of, trees_for
from foredraft.drafters.context import DrafterContext
from foredraft.engine.cache import KVCache, MemoryPool
from foredraft.engine.proposal import DraftRequest, Features, Proposal
from foredraft.engine.token_tree import ROOT
from foredraft.errors import ForedraftError
from foredraft.heads import CompiledEagle, EagleHead, HeadReading
from foredraft.model import Read
from foredraft.sampling import TokenProbs, draw_specs


class EagleDrafter:
    """Greedy and seeded requests get certain drafts, the others sampled ones with their probabilities.

    head: with keys and values of its own, which are taken from the pool. max_rows: of one pass. context_len: the longest
    sequence. A sequence whose history the target has not read yet, or whose cache finds no room, gets a proposal of zero.
    """

    grows_trees = True

    def __init__(
        self, head: EagleHead | CompiledEagle, vocab_size: int, pool: MemoryPool, context_len: int, max_rows: int = 512
    ) -> None:
        self.taps = head.config.taps
        self._head = head
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._cache = KVCache(pool, head.bytes_per_token, context_len)
        self._num_fused: dict[int, int] = {}

    @classmethod
    def build(cls, context: DrafterContext) -> EagleDrafter:
        if not isinstance(context.head, EagleHead | CompiledEagle):
            raise ForedraftError('method "eagle" needs an EAGLE head: give draft_model= its directory or hub id')
        return cls(context.head, context.vocab_size, context.pool, context.context_len, context.max_rows)

    @property
    def bytes_held(self) -> int:
        """Of the engine's cache memory."""
        return self._cache.bytes_held

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [Draft(request, request.max_len if request.has_all_features else 0) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0 and self._has_room(draft)]
        chains = [draft for draft in ready if draft.request.shape is None]
        with torch.inference_mode():
            self._write([draft for draft in chains if self._is_written(draft)], token_probs)
            self._extend_all([draft for draft in chains if not self._is_written(draft)], token_probs)
            self._grow(trees_for(ready))
        return as_proposal(drafts, token_probs)

    def forget(self, seq_ids: list[int]) -> None:
        self._cache.drop(seq_ids)
        for seq_id in seq_ids:
            self._num_fused.pop(seq_id, None)

    def _has_room(self, draft: Draft) -> bool:
        """Forget what was read of tokens that did not stand, and make room for those to come."""
        request = draft.request
        seq_id, tokens = request.seq_id, request.tokens
        num_features = len(_features_of(request))
        # the last row is always read again: it gives the first draft token
        kept = min(self._num_fused.get(seq_id, 0), num_features - 1)
        self._cache.keep_prefix_of(seq_id, tokens[1 : num_features + 1], at_most=kept)
        self._num_fused[seq_id] = self._cache.num_held(seq_id)
        if self._cache.reserve(seq_id, len(tokens) - 1 + draft.max_len - 1):
            return True
        self.forget([seq_id])
        return False

    def _is_written(self, draft: Draft) -> bool:
        """Whether the head writes it in one call."""
        return isinstance(self._head, CompiledEagle) and draft.request.num_forced == 0 and is_written(draft)

    def _write(self, drafts: Sequence[Draft], token_probs: list[TokenProbs]) -> None:
        """Each whole draft in one call."""
        head = self._head
        assert not drafts or isinstance(head, CompiledEagle)
        for group in self._passes(drafts):
            lens = [draft.max_len for draft in group]
            specs = draw_specs([draft.row for draft in group], lens)
            reads, states = self._fused(group)
            written = head.generate(reads, states, lens, self._vocab_size, self._cache, specs)  # type: ignore[operator]
            take_generated(group, written, specs, token_probs)

    def _catch_up(self, drafts: Sequence[Draft]) -> HeadReading:
        """Read all tokens that the target's features are there for, then those that are forced -> the reading of each last row."""
        parts = [self._head.read(*self._fused(group), self._cache) for group in self._passes(drafts)]
        logits, states = (torch.cat(each) for each in zip(*parts, strict=True))
        for place in range(max(draft.request.num_forced for draft in drafts)):
            rows = [row for row, draft in enumerate(drafts) if draft.request.num_forced > place]
            forced = [_first_forced(drafts[row].request) + place for row in rows]
            tokens = [drafts[row].request.tokens[position] for row, position in zip(rows, forced, strict=True)]
            reading = self._read_on([drafts[row] for row in rows], tokens, states[rows])
            logits[rows], states[rows] = reading.logits, reading.states
        return HeadReading(logits, states)

    def _extend_all(self, drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        """A pass for each token."""
        if not drafts:
            return
        reading = self._catch_up(drafts)
        while True:
            extend(drafts, self._head.on_target(reading.logits), self._vocab_size, token_probs)
            rows = [row for row, draft in enumerate(drafts) if draft.has_room]
            if not rows:
                return
            drafts = [drafts[row] for row in rows]
            reading = self._read_on(drafts, [draft.ids[-1] for draft in drafts], reading.states[rows])

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        """A pass for each level. It reads the levels before it anew: rows cost a head little."""
        if not trees:
            return
        reading = self._catch_up([tree.draft for tree in trees])
        num_read = {id(tree): self._cache.num_held(tree.request.seq_id) for tree in trees}
        states = {(id(tree), ROOT): reading.states[row] for row, tree in enumerate(trees)}

        def read(going_on: Sequence[DraftTree], depth: int) -> Tensor:
            nodes = inner_nodes(going_on, depth)
            before = torch.stack([states[id(tree), tree.shape.parents[node]] for tree, node in nodes])
            reading = self._head.read([read_of(tree, depth) for tree in going_on], before, self._cache)
            states.update({(id(tree), node): state for (tree, node), state in zip(nodes, reading.states, strict=True)})
            for tree in going_on:
                self._cache.keep_prefix_of(tree.request.seq_id, tree.request.tokens[1:], at_most=num_read[id(tree)])
            return self._head.on_target(reading.logits[last_level(going_on, depth)])

        grow_all(trees, self._head.on_target(reading.logits), self._vocab_size, read)

    def _fused(self, drafts: Sequence[Draft], at_most: int | None = None) -> tuple[list[Read], Tensor]:
        """What is left to read with the target's features, and their states [R, H]."""
        reads, features = [], []
        for draft in drafts:
            request = draft.request
            start = self._cache.num_held(request.seq_id)
            new = _features_of(request).since(start)[:at_most]
            reads.append(Read(request.seq_id, request.tokens[start + 1 : start + 1 + len(new)], 1))
            features.append(new)
            self._num_fused[request.seq_id] = start + len(new)
        return reads, self._head.fuse(torch.cat(features).to(self._head.dtype))

    def _read_on(self, drafts: Sequence[Draft], tokens: Sequence[int], states: Tensor) -> HeadReading:
        """A token more for each, with the head's own states. states: [len(drafts), H]"""
        reads = [Read(draft.request.seq_id, [token], 1) for draft, token in zip(drafts, tokens, strict=True)]
        return self._head.read(reads, states, self._cache)

    def _num_unread(self, draft: Draft) -> int:
        return len(_features_of(draft.request)) - self._cache.num_held(draft.request.seq_id)

    def _passes(self, drafts: Sequence[Draft]) -> Iterator[list[Draft]]:
        """Groups whose unread rows make passes of at most max_rows rows; what one has beyond that is read before."""
        group, num_rows = list[Draft](), 0
        for draft in drafts:
            while self._num_unread(draft) > self._max_rows:
                self._head.read(*self._fused([draft], self._max_rows), self._cache)
            length = self._num_unread(draft)
            if group and num_rows + length > self._max_rows:
                yield group
                group, num_rows = [], 0
            group.append(draft)
            num_rows += length
        if group:
            yield group


def _features_of(request: DraftRequest) -> Features:
    assert request.features is not None
    return request.features


def _first_forced(request: DraftRequest) -> int:
    return len(request.tokens) - request.num_forced
