"""Decides how much of a measurement a budget allows, on a machine that may have become busier since the measurement was planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

Now = Callable[[], float]
"""Seconds from an arbitrary start."""

_GRACE = 1.25
"""A round that was expected to fit is given up when the budget is overdrawn by this factor."""


@dataclass(slots=True)
class Clock:
    """Decides when to stop. budget: seconds from `started` on. repeats: the most passes over all groups. None: no limit."""

    budget: float | None
    repeats: int | None
    num_groups: int
    progress: Callable[[float], None] | None = None
    now: Now = time.perf_counter
    started: float = field(init=False)
    _durations: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.now()

    @property
    def spent(self) -> float:
        return self.now() - self.started

    @property
    def is_overdrawn(self) -> bool:
        return self.budget is not None and self.spent > _GRACE * self.budget

    def rounds(self) -> Iterator[tuple[int, int]]:
        """(repeat, group): every configuration runs the group before the next round begins. The first always runs."""
        for number in count():
            repeat, group = divmod(number, self.num_groups)
            before = self.spent
            is_over = self._is_over(repeat, before)
            if self.progress is not None:
                self.progress(1.0 if is_over else self._share(number, before))
            if is_over:
                return
            yield repeat, group
            self._durations.append(self.spent - before)

    def _is_over(self, repeat: int, spent: float) -> bool:
        if self.repeats is not None and repeat >= self.repeats:
            return True
        # the next round may be as slow as the slowest: others use the machine too
        return self.budget is not None and bool(self._durations) and spent + max(self._durations) > self.budget

    def _share(self, number: int, spent: float) -> float:
        by_time = spent / self.budget if self.budget else 0.0
        by_count = number / (self.repeats * self.num_groups) if self.repeats else 0.0
        return min(1.0, max(by_time, by_count))


def affordable_tokens(max_tokens: int, num_tried: int, seconds: float, left: float) -> int:
    """The longest text that fits, in tokens. seconds: the time of a text of num_tried tokens. left: the time left for one text."""
    expected = seconds * max_tokens / num_tried
    if expected <= left:
        return max_tokens
    return max(num_tried, int(max_tokens * max(left, 0.0) / expected))


def describe_cuts(left_out: Sequence[str], requested: tuple[int, int], measured: tuple[int, int]) -> tuple[str, ...]:
    """What a budget cut, one line for each kind of cut. requested, measured: tokens per text, and number of questions."""
    lines = []
    if left_out:
        lines.append(f"skipped, because the budget was used up: {', '.join(left_out)}")
    if measured[0] < requested[0]:
        lines.append(f"texts of {measured[0]} tokens instead of {requested[0]}")
    if measured[1] < requested[1]:
        lines.append(f"{measured[1]} of {requested[1]} questions")
    return tuple(lines)
