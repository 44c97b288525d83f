"""What a pass and a draft cost on this machine, as far as it was measured. Times in seconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_KEPT = 32
_ENOUGH = 3
_RENEWED_AFTER = 8
_FAR, _FAR_KEPT = 4, 8
"""From so many times what is known on it is far; and how many such points are kept."""
STALL = 3.0
"""A step that took so many times as long as usual was held up by something else: it counts as one that took this long."""
HOPE = 0.5
"""What a draft took in an earlier process counts for this much. That may have been a busy hour; and while a price that is too low is
found out by the first drafts, one that is too high is not, since nobody drafts."""
_KINDS = {False: "greedy", True: "sampled"}


Point = tuple[int, int, float]
"""Seconds of x things for a group of n."""


def typical_time(samples: Collection[float]) -> float:
    """The mean, since it is what many steps take together; but one that took very long, as now and then one does for reasons
    of its own, counts as three usual ones."""
    most = STALL * median(samples)
    return sum(min(seconds, most) for seconds in samples) / len(samples)


def undisturbed_time(samples: Collection[float]) -> float:
    """The lower quartile, for work that is the same every time. On a machine that others use too, steps of a kind are measured in
    better and worse moments, and their means say more of the moments than of the kind: one that was measured in bad ones
    only would look dear, would not be chosen, and would never be measured again."""
    return sorted(samples)[len(samples) // 4]


class Curve:
    """Seconds by x, for groups of n: what the last few samples took, never less for more, with straight lines between.

    slope: where a single x is known, and nothing far from it, how much of its time one more x is thought to take.
    typical: of a few samples, the time that counts.
    """

    def __init__(self, slope: float, typical: Callable[[Collection[float]], float] = typical_time) -> None:
        self._slope = slope
        self._statistic = typical
        self._far: deque[tuple[int, float]] = deque(maxlen=_FAR_KEPT)
        self._samples: dict[int, dict[int, deque[float]]] = {}
        self._lines: dict[int, tuple[list[int], list[float]]] = {}
        self._typical: dict[tuple[int, int], float] = {}
        self._num_added = 0

    def add(self, n: int, x: int, seconds: float) -> None:
        samples = self._samples.setdefault(n, {}).setdefault(x, deque(maxlen=_KEPT))
        samples.append(seconds)
        self._typical.pop((n, x), None)
        self._num_added += 1
        # a line takes as long as many a small model's step: once its points are known, it is drawn anew now and then
        if len(samples) <= _ENOUGH or self._num_added % _RENEWED_AFTER == 0:
            self._lines.pop(n, None)

    def add_far(self, x: int, seconds: float) -> None:
        """Something of another kind that takes about as long for each x, with many of them: a guess, until x was measured."""
        self._far.append((x, seconds))

    def add_known(self, points: Iterable[Point], factor: float = 1.0) -> None:
        """What points() gave once, times a factor: as good as a few samples, for what was not measured since."""
        for n, x, seconds in points:
            if not self.num_samples(n, x):
                for _ in range(_ENOUGH):
                    self.add(n, x, factor * seconds)

    def num_samples(self, n: int, x: int) -> int:
        """At most as many as are kept."""
        return len(self._samples.get(n, {}).get(x, ()))

    def mean_of(self, n: int, x: int) -> float | None:
        """Of the samples themselves, undisturbed or not; None where there are none."""
        samples = self._samples.get(n, {}).get(x)
        return typical_time(samples) if samples else None

    def at(self, n: int, x: float) -> float | None:
        """None where nothing was measured. For an n that was not, or not down to x, the nearest one speaks that was."""
        if not self._samples:
            return None
        if n not in self._samples or min(self._samples[n]) > x:
            n = min(self._samples, key=lambda known: (min(self._samples[known]) > x, abs(known - n) / max(known, n)))
        xs, seconds = self._line(n)
        if len(xs) == 1:
            return max(seconds[0] + self._guessed_rise(xs[0], seconds[0]) * (x - xs[0]), 0.1 * seconds[0])
        right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        left = right - 1
        if x > xs[-1]:  # beyond what was measured one step between neighbours says little
            left = 0
        rise = (seconds[right] - seconds[left]) / (xs[right] - xs[left])
        anchor = right if x > xs[-1] else left
        return max(seconds[anchor] + rise * (x - xs[anchor]), 0.1 * seconds[0])

    def _guessed_rise(self, known: int, seconds: float) -> float:
        """What one more x takes, by a line to what lies far away: to the lowest, since the first ones take long."""
        rises = [(far - seconds) / (x - known) for x, far in self._far if x >= _FAR * known]
        return max(min(rises), 0.0) if rises else self._slope * seconds

    def points(self) -> Iterator[Point]:
        """(n, x, seconds) of all that is known."""
        for n in self._samples:
            xs, seconds = self._line(n)
            yield from ((n, x, t) for x, t in zip(xs, seconds, strict=True))

    def _line(self, n: int) -> tuple[list[int], list[float]]:
        """A point needs a few samples before it counts, unless there is no other."""
        if n not in self._lines:
            samples = self._samples[n]
            xs = sorted(x for x in samples if len(samples[x]) >= _ENOUGH) or sorted(samples)
            times = _rising([self._typical_at(n, x) for x in xs], [len(samples[x]) for x in xs])
            self._lines[n] = xs, times
        return self._lines[n]

    def _typical_at(self, n: int, x: int) -> float:
        if (n, x) not in self._typical:
            self._typical[n, x] = self._statistic(self._samples[n][x])
        return self._typical[n, x]


def _steps_curve() -> Curve:
    return Curve(slope=0.05, typical=undisturbed_time)


def _as_time(seconds: float) -> float:
    """Raises ValueError for what no clock says."""
    if not 0.0 <= float(seconds) < math.inf:
        raise ValueError(f"{seconds} is no time")
    return float(seconds)


def _rising(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest sequence that never falls (weighted least squares, by pooling neighbours that do)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            before, its_weight, its_count = pools.pop()
            mean = (mean * total + before * its_weight) / (total + its_weight)
            total, count = total + its_weight, count + its_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Remembered:
    """Costs.as_dict, read again."""

    steps: dict[bool, list[Point]]
    drafts: dict[tuple[str, bool], list[Point]]
    reading: dict[str, float]

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Remembered:
        """Raises KeyError, TypeError or ValueError for what as_dict never gave."""
        kinds = {name: sampled for sampled, name in _KINDS.items()}
        return cls(
            {sampled: [_point(*point) for point in found["steps"][name]] for name, sampled in kinds.items()},
            {(str(name), kinds[kind]): [_point(*point) for point in points] for name, kind, points in found["drafts"]},
            {str(name): _as_time(seconds) for name, seconds in dict(found["reading"]).items()},
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": {_KINDS[sampled]: points for sampled, points in self.steps.items()},
            "drafts": [[name, _KINDS[sampled], points] for (name, sampled), points in self.drafts.items()],
            "reading": dict(self.reading),
        }


def _point(n: int, x: int, seconds: float) -> Point:
    if not (1 <= n < math.inf and 0 <= x < math.inf):
        raise ValueError(f"nothing is measured for {n}, {x}")
    return int(n), int(x), _as_time(seconds)


class Costs:
    """The target's steps (all but the drafting) by sequences and rows, each drafter's time by requests and depth.

    sampled: greedy and sampling requests are told apart, since drawing and weighing take their own time.
    remembered: what an earlier process has measured. The machine may be busier now, or less: all of it is moved by one factor
    as soon as plain steps were measured again, and counts only from then on.
    """

    def __init__(self, remembered: Remembered | None = None) -> None:
        self._remembered = remembered
        self.steps = {sampled: _steps_curve() for sampled in (False, True)}
        self.drafts: dict[tuple[str, bool], Curve] = {}
        self._reading: dict[str, deque[float]] = {}
        self._most_reading: dict[str, float] = {}
        self.num_samples = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: seconds, by what was measured; what is remembered, as long as nothing newer is known."""
        if self._remembered is not None:
            return self._remembered.as_dict()
        return {
            "steps": {_KINDS[sampled]: list(curve.points()) for sampled, curve in self.steps.items()},
            "drafts": [[name, _KINDS[sampled], list(curve.points())] for (name, sampled), curve in self.drafts.items()],
            "reading": {name: median(samples) for name, samples in self._reading.items()},
        }

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Costs:
        """Raises KeyError, TypeError or ValueError for what as_dict never gave."""
        return cls(Remembered.from_dict(found))

    def record_step(self, num_sequences: int, num_rows: int, seconds: float, *, sampled: bool) -> None:
        """num_rows: of the target's pass, one of each sequence and its draft tokens."""
        curve = self.steps[sampled]
        curve.add(num_sequences, num_rows, seconds)
        self.num_samples += 1
        if num_rows == num_sequences and curve.num_samples(num_sequences, num_rows) >= _ENOUGH:
            self._recall(num_sequences, sampled)

    def record_reading(self, num_rows: int, seconds: float) -> None:
        """A pass that read prompts. Where no draft has been verified yet, it tells what rows add: from nothing, on a machine
        that is waiting for memory, to a quarter of a pass each."""
        for curve in self.steps.values():
            curve.add_far(num_rows, seconds)

    def record_draft(
        self, drafter: str, num_requests: int, depth: int, num_missed: int, seconds: float, *, sampled: bool
    ) -> None:
        """depth: of the longest draft asked for. num_missed: tokens the drafter had to read beyond the last step's."""
        curve = self._drafts(drafter, sampled)
        usual = curve.at(num_requests, depth)
        if num_missed and usual is not None:
            self._reading.setdefault(drafter, deque(maxlen=_KEPT)).append(max(seconds - usual, 0.0) / num_missed)
        elif num_missed:  # as if drafting had taken no time
            self._most_reading[drafter] = min(seconds / num_missed, self._most_reading.get(drafter, math.inf))
        else:
            curve.add(num_requests, depth, seconds)

    def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool) -> float | None:
        """What such a step takes undisturbed. None where nothing of the kind was measured."""
        return self.steps[sampled].at(num_sequences, num_rows)

    def plain_time(self, num_sequences: int, *, sampled: bool) -> float | None:
        """What plain steps take as they come, disturbed ones too: for what single steps are compared with. None as above."""
        curve = self.steps[sampled]
        mean = curve.mean_of(num_sequences, num_sequences)
        return curve.at(num_sequences, num_sequences) if mean is None else mean

    def draft_time(self, drafter: str, num_requests: int, depth: int, *, sampled: bool) -> float:
        """0 where nothing was measured: trying it is how to find out."""
        return self._drafts(drafter, sampled).at(num_requests, depth) or 0.0

    def reading_time(self, drafter: str, num_tokens: int) -> float:
        """What it takes a drafter to read tokens it has missed, a prompt for instance."""
        samples = self._reading.get(drafter)
        return (median(samples) if samples else self._most_reading.get(drafter, 0.0)) * num_tokens

    def knows_plain(self, num_sequences: int, *, sampled: bool) -> bool:
        """Whether plain steps of so many sequences were measured, or of about so many."""
        curve = self.steps[sampled]
        near = range(num_sequences * 2 // 3, num_sequences * 3 // 2 + 1)
        return any(curve.num_samples(n, n) >= _ENOUGH for n in near)

    def _recall(self, num_sequences: int, sampled: bool) -> None:
        """Plain steps are known: what is remembered can be brought up to date."""
        if self._remembered is None:
            return
        before = _steps_curve()
        before.add_known(self._remembered.steps[sampled])
        then, now = before.at(num_sequences, num_sequences), self.steps[sampled].at(num_sequences, num_sequences)
        if not then or not now:
            return
        for kind, points in self._remembered.steps.items():
            self.steps[kind].add_known(points, now / then)
        for (name, kind), points in self._remembered.drafts.items():
            self._drafts(name, kind).add_known(points, HOPE * now / then)
        for name, seconds in self._remembered.reading.items():
            self._reading.setdefault(name, deque([HOPE * seconds * now / then], maxlen=_KEPT))
        self._remembered = None

    def _drafts(self, drafter: str, sampled: bool) -> Curve:
        key = (drafter, sampled)
        if key not in self.drafts:
            self.drafts[key] = Curve(slope=0.25)
        return self.drafts[key]
