"""What the live page plots: the engine's counts and load at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Counts(NamedTuple):
    """Totals up to a moment; the difference of two of them is what happened in between.

    num_passes and num_asked_*: since the observer was attached. The others: as in SpeculationStats, since the engine started.
    num_asked_steps: verified rows for which the policy wanted a draft. num_asked_tokens: the draft tokens it wanted.
    """

    num_passes: int = 0
    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_evaluated_tokens: int = 0
    num_emitted_tokens: int = 0
    num_asked_steps: int = 0
    num_asked_tokens: int = 0


class Sample(NamedTuple):
    """time: seconds since the observer was created. cache_*: bytes; retained ones count as used, but are freed when needed.
    asked: rows for which a draft was wanted, by drafter. resting: the drafters that are cooling down, and why. fallbacks: how
    often a drafter was switched off, by drafter and reason.

    The field names are those of the page's JSON.
    """

    time: float
    counts: Counts
    num_running: int
    num_waiting: int
    cache_used: int
    cache_retained: int
    cache_total: int
    asked: Mapping[str, int]
    resting: Mapping[str, str]
    fallbacks: Mapping[str, int]

    def flat(self) -> dict[str, Any]:
        """The sample as one dict, with the counts among its other fields."""
        fields = self._asdict()
        return {"time": fields.pop("time"), **fields.pop("counts")._asdict(), **fields}
