"""Choosing between two variants of a drafter: both are tried, and their accepted draft tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from foredraft.engine.proposal import DraftRequest
from foredraft.engine.token_tree import ROOT

TRIAL_PERIOD = 16
_DECAY = 0.97
_PRIOR_TOKENS = 4.0


class _Pending(NamedTuple):
    """A draft whose acceptance is not known yet. start: its position in the text. parents: None for a chain."""

    start: int
    ids: Sequence[int]
    parents: Sequence[int] | None
    variant: int


class DraftVariants:
    """Variants 0 and 1. The better one drafts, except every TRIAL_PERIOD-th time, when the other does. The better one has the higher
    recent acceptance rate: accepted draft tokens, divided by accepted and first rejected ones. In a tie variant 0 drafts.

    The choice depends on committed texts alone, not on the draft being made.
    """

    def __init__(self) -> None:
        self._accepted = [0.0, 0.0]
        self._evaluated = [_PRIOR_TOKENS, _PRIOR_TOKENS]
        self._pending: dict[int, _Pending] = {}
        self._num_choices = 0

    @property
    def better(self) -> int:
        rates = [accepted / evaluated for accepted, evaluated in zip(self._accepted, self._evaluated, strict=True)]
        return int(rates[1] > rates[0])

    def choose(self, requests: Sequence[DraftRequest]) -> int:
        """The variant that drafts for these requests, after counting what was accepted of their last drafts."""
        for request in requests:
            self._count(request)
        self._num_choices += 1
        return self.better if self._num_choices % TRIAL_PERIOD else 1 - self.better

    def remember(self, request: DraftRequest, ids: Sequence[int], parents: Sequence[int] | None, variant: int) -> None:
        """Note a draft, to be counted when its text goes on."""
        if ids:
            self._pending[request.seq_id] = _Pending(len(request.tokens), ids, parents, variant)

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self._pending.pop(seq_id, None)

    def _count(self, request: DraftRequest) -> None:
        draft = self._pending.pop(request.seq_id, None)
        if draft is None or len(request.tokens) <= draft.start:
            return
        num_accepted, has_more = _follow(draft, request.tokens)
        self._accepted[draft.variant] = _DECAY * self._accepted[draft.variant] + num_accepted
        self._evaluated[draft.variant] = _DECAY * self._evaluated[draft.variant] + num_accepted + has_more


def _follow(draft: _Pending, tokens: Sequence[int]) -> tuple[int, bool]:
    """How many draft tokens the text contains, and whether the draft had more after them."""
    parents = range(ROOT, len(draft.ids) - 1) if draft.parents is None else draft.parents
    node = ROOT
    for position in range(draft.start, len(tokens) + 1):
        children = [child for child, parent in enumerate(parents) if parent == node]
        fitting = [child for child in children if position < len(tokens) and draft.ids[child] == tokens[position]]
        if not fitting:
            return position - draft.start, bool(children)
        node = fitting[0]
    raise AssertionError
