"""Drafts from the logits of several places at once, where each place is corrected by the tokens drafted before it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foredraft.drafters._drafts import Draft, extend
from foredraft.drafters._trees import DraftTree, grow, growing_nodes, trees_for
from foredraft.engine.token_tree import ROOT
from foredraft.sampling import TokenProbs


class Step(Protocol):
    """rows: [n], of the places. previous: [n], the token before each. memory: [n, ..] -> logits [n, V'], memory after the places"""

    def __call__(self, rows: Tensor, previous: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]: ...


class Walk(NamedTuple):
    """rows: the rows of the draft's places, in order; max_len of them for a chain. previous: the token before the first place. memory:
    [..], before that place."""

    draft: Draft
    rows: range
    previous: int
    memory: Tensor


def draft_walks(walks: Sequence[Walk], step: Step, vocab_size: int, token_probs: list[TokenProbs]) -> None:
    """Write all these drafts, chains and trees. token_probs: as in extend."""
    _write([walk for walk in walks if walk.draft.request.shape is None], step, vocab_size, token_probs)
    _grow([walk for walk in walks if walk.draft.request.shape is not None], step, vocab_size)


def _write(walks: Sequence[Walk], step: Step, vocab_size: int, token_probs: list[TokenProbs]) -> None:
    """Write chains, one step per place."""
    if not walks:
        return
    previous, memory = [walk.previous for walk in walks], torch.stack([walk.memory for walk in walks])
    while walks:
        rows = [walk.rows[len(walk.draft.ids)] for walk in walks]
        logits, memory = step(_on(memory, rows), _on(memory, previous), memory)
        extend([walk.draft for walk in walks], logits, vocab_size, token_probs)
        going_on = [place for place, walk in enumerate(walks) if walk.draft.has_room]
        memory = memory if len(going_on) == len(walks) else memory[going_on]
        walks = [walks[place] for place in going_on]
        previous = [walk.draft.ids[-1] for walk in walks]


def _grow(walks: Sequence[Walk], step: Step, vocab_size: int) -> None:
    """Grow trees, one step per level for all its nodes that have children."""
    trees = trees_for([walk.draft for walk in walks])
    walk_of = {id(tree): walk for tree, walk in zip(trees, walks, strict=True)}
    memories: dict[tuple[int, int], Tensor] = {}
    for depth in count():
        growing = [tree for tree in trees if depth < len(walk_of[id(tree)].rows)]
        nodes = list(growing_nodes(growing, depth))
        if not nodes:
            break
        before = [_before(tree, node, walk_of[id(tree)], memories) for tree, node in nodes]
        memory = torch.stack([each for _, each in before])
        rows = _on(memory, [walk_of[id(tree)].rows[depth] for tree, _ in nodes])
        logits, memory = step(rows, _on(memory, [token for token, _ in before]), memory)
        memories.update({(id(tree), node): each for (tree, node), each in zip(nodes, memory, strict=True)})
        grow(growing, depth, logits, vocab_size)
    for tree in trees:
        tree.finish()


def _before(tree: DraftTree, node: int, walk: Walk, memories: dict[tuple[int, int], Tensor]) -> tuple[int, Tensor]:
    """The token before the children of a node, and the memory before their place."""
    if node == ROOT:
        return walk.previous, walk.memory
    return tree.ids[node], memories[id(tree), tree.shape.parents[node]]


def _on(memory: Tensor, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, device=memory.device)
