"""Drafters whose text changes its character at a place that is known: right up to there and wrong behind it, or the reverse."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.proposal import Drafter, DraftRequest, Proposal


class Turning:
    """Takes the time of another drafter, and says what is right, or what is not, before and behind a turn.

    paid: the drafter whose time it takes; None: next to none. is_right_first: before the turn; behind it the reverse.
    """

    def __init__(self, paid: Drafter | None, *, is_right_first: bool) -> None:
        self._paid, self._is_right_first = paid, is_right_first
        self._truth: Sequence[int] = ()
        self._turn = 0

    def expect(self, truth: Sequence[int], turn: int) -> None:
        """The next request. truth: its whole text, prompt included. turn: the place in it."""
        self._truth, self._turn = truth, turn

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> certain rows"""
        if self._paid is not None:
            self._paid.propose(requests)
        return Proposal.certain([self._row(len(request.tokens), request.max_len) for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        if self._paid is not None:
            self._paid.forget(seq_ids)

    def _row(self, start: int, count: int) -> list[int]:
        row = self._truth[start : start + count]
        return [t if (start + j < self._turn) == self._is_right_first else (t + 1) % 4096 for j, t in enumerate(row)]


class RightFirst(Turning):
    def __init__(self, paid: Drafter | None) -> None:
        super().__init__(paid, is_right_first=True)


class RightLast(Turning):
    def __init__(self, paid: Drafter | None) -> None:
        super().__init__(paid, is_right_first=False)
