"""Heads that draft token by token: rows of draft tokens have the head's own state in place of the target's features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, as_proposal, extend
from foredraft.drafters._fused import FusedReader, Head
from foredraft.drafters._trees import DraftTree, grow_all, inner_nodes, last_level, read_of, trees_for
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.token_tree import ROOT
from foredraft.heads import HeadReading
from foredraft.model import Read
from foredraft.sampling import TokenProbs, select


class AutoregressiveReader(FusedReader[Head]):
    """Greedy and seeded requests get certain draft tokens, the others sampled ones with their probabilities."""

    grows_trees = True

    def _drafted(self, requests: list[DraftRequest]) -> Proposal:
        """Draft chains or trees, as each request asks."""
        drafts = [Draft(request, request.max_len if request.has_all_features else 0) for request in requests]
        token_probs: list[TokenProbs] = []
        ready = [draft for draft in drafts if draft.max_len > 0 and self._has_room(draft)]
        self._draft_chains([draft for draft in ready if draft.request.shape is None], token_probs)
        self._grow(trees_for(ready))
        return as_proposal(drafts, token_probs)

    def _draft_chains(self, drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        self._extend_all(drafts, token_probs)

    def _catch_up(self, drafts: Sequence[Draft]) -> HeadReading:
        """Read all tokens that have features of the target, then the forced tokens -> the reading of each draft's last row."""
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
        """Draft chains, one pass per token."""
        if drafts:
            with torch.inference_mode():
                self._extend(drafts, token_probs)

    def _extend(self, drafts: list[Draft], token_probs: list[TokenProbs]) -> None:
        reading = self._catch_up(drafts)
        while True:
            extend(drafts, self._head.on_target(reading.logits), self._vocab_size, token_probs)
            rows = [row for row, draft in enumerate(drafts) if draft.has_room]
            if not rows:
                return
            drafts = [drafts[row] for row in rows]
            reading = self._read_on(drafts, [draft.ids[-1] for draft in drafts], reading.states[rows])

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        """Grow trees, one pass per level. Each pass reads the previous levels again, since rows cost a head little."""
        if trees:
            with torch.inference_mode():
                self._grow_by_level(trees)

    def _grow_by_level(self, trees: Sequence[DraftTree]) -> None:
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
            return self._head.on_target(select(reading.logits, last_level(going_on, depth)))

        grow_all(trees, self._head.on_target(reading.logits), self._vocab_size, read)

    def _read_on(self, drafts: Sequence[Draft], tokens: Sequence[int], states: Tensor) -> HeadReading:
        """Read one more token for each draft, with the head's own states. states: [len(drafts), H]"""
        reads = [Read(draft.request.seq_id, [token], 1) for draft, token in zip(drafts, tokens, strict=True)]
        return self._head.read(reads, states, self._cache)


def _first_forced(request: DraftRequest) -> int:
    return len(request.tokens) - request.num_forced
