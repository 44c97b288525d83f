"""Drafts from the logits of several places at once, each independent of the tokens drafted at the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from torch import Tensor

from foredraft.drafters._drafts import Draft, append_choices, extend, fit_vocabulary
from foredraft.drafters._trees import grow, growing_nodes, trees_for
from foredraft.sampling import TokenProbs, select


class Slots(NamedTuple):
    """rows: the rows of the logits for the draft's places, in order; max_len of them for a chain."""

    draft: Draft
    rows: range


def num_places(draft: Draft) -> int:
    """How many places a draft has: max_len for a chain, the depth of a tree."""
    shape = draft.request.shape
    return draft.max_len if shape is None else shape.cut(draft.max_len).depth


def slots_of(drafts: Sequence[Draft], num_passed_over: Sequence[int] | None = None) -> list[Slots]:
    """The slots in logits that hold the places of one draft after another. num_passed_over: for each draft, how many rows precede
    those of its places; None: none."""
    slots, first = [], 0
    for draft, passed_over in zip(drafts, num_passed_over or [0] * len(drafts), strict=True):
        last = first + passed_over + num_places(draft)
        slots.append(Slots(draft, range(first + passed_over, last)))
        first = last
    return slots


def draft_slots(slots: Sequence[Slots], logits: Tensor, vocab_size: int, token_probs: list[TokenProbs]) -> None:
    """Write all these drafts, chains and trees. logits: [R, V'], cut or padded to vocab_size. token_probs: as in extend."""
    logits = fit_vocabulary(logits, vocab_size)
    chains = [each for each in slots if each.draft.request.shape is None]
    depends = [each.draft.request.sampler.changes_logits for each in chains]
    _write_at_once([each for each, waits in zip(chains, depends, strict=True) if not waits], logits, token_probs)
    _write_in_turn([each for each, waits in zip(chains, depends, strict=True) if waits], logits, token_probs)
    _grow([each for each in slots if each.draft.request.shape is not None], logits)


def _write_at_once(slots: Sequence[Slots], logits: Tensor, token_probs: list[TokenProbs]) -> None:
    """Draft all places in one step: where nothing changes the logits, the choice at a place depends only on its position."""
    if not slots:
        return
    drafts = [each.draft for each in slots for _ in each.rows]
    places = [range(place) for each in slots for place in range(len(each.rows))]
    rows = [draft.row._replace(drafted=before) for draft, before in zip(drafts, places, strict=True)]
    append_choices(drafts, rows, select(logits, [row for each in slots for row in each.rows]), token_probs)


def _write_in_turn(slots: Sequence[Slots], logits: Tensor, token_probs: list[TokenProbs]) -> None:
    """Draft place by place: penalties and constraints depend on the tokens before."""
    while slots:
        rows = [each.rows[len(each.draft.ids)] for each in slots]
        extend([each.draft for each in slots], select(logits, rows), logits.shape[1], token_probs)
        slots = [each for each in slots if each.draft.has_room]


def _grow(slots: Sequence[Slots], logits: Tensor) -> None:
    """Grow trees: all nodes at one depth share the logits of one place."""
    trees = trees_for([each.draft for each in slots])
    rows = {id(tree): each.rows for tree, each in zip(trees, slots, strict=True)}
    for depth in count():
        growing = [tree for tree in trees if depth < len(rows[id(tree)])]
        wanted = [rows[id(tree)][depth] for tree, _ in growing_nodes(growing, depth)]
        if not wanted:
            break
        grow(growing, depth, logits[wanted], logits.shape[1])
    for tree in trees:
        tree.finish()
