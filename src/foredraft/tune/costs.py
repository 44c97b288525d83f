"""The time of a step at depths that were not measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from foredraft.policy.curve import STALL, typical_time
from foredraft.tune.rounds import Round

_ENOUGH, _SHARE = 8, 0.1


class Line:
    """The mean value at each measured x, interpolated linearly, constant beyond the ends."""

    def __init__(self) -> None:
        self._samples: defaultdict[int, list[float]] = defaultdict(list)
        self._points: tuple[list[int], list[float]] | None = None

    def add(self, x: int, value: float) -> None:
        self._samples[x].append(value)
        self._points = None

    def at(self, x: float) -> float:
        """0 where nothing was measured."""
        xs, means = self.points()
        return float(np.interp(x, xs, means)) if xs else 0.0

    def points(self) -> tuple[list[int], list[float]]:
        """x and mean. An x with few samples (the last rounds of a text draft less) counts only if all others have few too."""
        if self._points is None:
            most = max(map(len, self._samples.values()), default=0)
            enough = max(_ENOUGH, _SHARE * most)
            xs = sorted(x for x, samples in self._samples.items() if len(samples) >= enough) or sorted(self._samples)
            self._points = xs, [typical_time(self._samples[x]) for x in xs]
        return self._points


class StepCosts:
    """Verification time by sequences and rows, which is v(n) of docs/guides/tuning.md, and drafting time by requests and depth.
    Both belong to one drafter, because each drafter leaves different data in the processor's caches.

    rounds: at several depths, including those without drafts.
    """

    def __init__(self, rounds: Iterable[Round]) -> None:
        self._steps: defaultdict[int, Line] = defaultdict(Line)
        self._drafts: defaultdict[int, Line] = defaultdict(Line)
        for one in rounds:
            self._steps[one.num_sequences].add(one.num_rows(one.depth), one.seconds - one.draft_seconds)
            if one.depth:
                self._drafts[one.num_asked].add(one.depth, one.draft_seconds)

    def verify_seconds(self, num_sequences: int, num_rows: int) -> float:
        return _line(self._steps, num_sequences).at(num_rows)

    def draft_seconds(self, num_requests: int, depth: int) -> float:
        return _line(self._drafts, num_requests).at(depth) if depth and num_requests else 0.0

    def usual_seconds(self, one: Round) -> float:
        """The time of the step without stalls."""
        return min(one.seconds, STALL * self._expected_seconds(one, one.depth))

    def difference(self, one: Round, speculative_tokens: int) -> float:
        """How much longer the step would have taken with at most this many draft tokens requested. Usually below 0. A step that took less
        than steps like it usually do saves less, too, so that no step takes less than nothing."""
        depth = min(one.depth, speculative_tokens)
        if depth == one.depth:
            return 0.0
        usual = self._expected_seconds(one, one.depth)
        scale = min(1.0, one.seconds / usual) if usual else 1.0
        return scale * (self._expected_seconds(one, depth) - usual)

    def _expected_seconds(self, one: Round, depth: int) -> float:
        """What a step like this one takes with at most this many draft tokens requested."""
        verify = self.verify_seconds(one.num_sequences, one.num_rows(depth))
        return verify + self.draft_seconds(one.num_asked, depth)


def _line(lines: dict[int, Line], n: int) -> Line:
    """The line of the nearest n that was measured."""
    return lines[min(lines, key=lambda known: abs(known - n))] if lines else Line()
