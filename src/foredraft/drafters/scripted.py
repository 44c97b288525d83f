"""A public fake that drafts what a script returns, for examples and for tests of code that consumes proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.errors import ForedraftError

Script = Callable[[DraftRequest], Sequence[int]]
"""What to propose for a request; the drafter cuts it to max_len."""


class ScriptedDrafter:
    """Proposes what `script(request)` returns, cut to the request's max_len, every id certain.

    corrupt_every: k makes the draft token wrong at each history position that k divides (positions count from 1), to
        force rejections; None changes nothing. It depends on the position and not on the call, so that the same
        request always gets the same answer.
    """

    def __init__(self, script: Script, *, corrupt_every: int | None = None) -> None:
        if corrupt_every is not None and corrupt_every < 1:
            raise ForedraftError(f"corrupt_every must be at least 1, or None, not {corrupt_every}")
        self._script = script
        self._corrupt_every = corrupt_every

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> one row of certain tokens per request"""
        return Proposal.certain([self._row(request) for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        """There is nothing to release."""

    def _row(self, request: DraftRequest) -> list[int]:
        row = list(self._script(request)[: request.max_len])
        if self._corrupt_every is None:
            return row
        start = len(request.tokens) + 1
        return [t if (start + j) % self._corrupt_every else _another(t) for j, t in enumerate(row)]


def _another(token: int) -> int:
    """Another id than `token`, valid in every vocabulary of two or more ids that has `token`."""
    return token - 1 if token else 1
