"""Drafters whose acceptance changes at a known position: correct before it and wrong after it, or the reverse."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.proposal import Drafter, DraftRequest, Proposal


class SwitchingDrafter:
    """Takes as long as another drafter, and proposes the correct tokens, or wrong ones, before and after a switch.

    timed: the drafter whose time it takes; None: almost no time. is_correct_first: correct before the switch and wrong after it.
    """

    def __init__(self, timed: Drafter | None, *, is_correct_first: bool) -> None:
        self._timed, self._is_correct_first = timed, is_correct_first
        self._truth: Sequence[int] = ()
        self._switch = 0

    def expect(self, truth: Sequence[int], switch: int) -> None:
        """Set the next request. truth: its whole text, prompt included. switch: the position of the change in it."""
        self._truth, self._switch = truth, switch

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> certain rows"""
        if self._timed is not None:
            self._timed.propose(requests)
        return Proposal.certain([self._row(len(request.tokens), request.max_len) for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        if self._timed is not None:
            self._timed.forget(seq_ids)

    def _row(self, start: int, count: int) -> list[int]:
        row = self._truth[start : start + count]
        return [
            t if (start + j < self._switch) == self._is_correct_first else (t + 1) % 4096 for j, t in enumerate(row)
        ]


class CorrectFirst(SwitchingDrafter):
    def __init__(self, timed: Drafter | None) -> None:
        super().__init__(timed, is_correct_first=True)


class CorrectLast(SwitchingDrafter):
    def __init__(self, timed: Drafter | None) -> None:
        super().__init__(timed, is_correct_first=False)
