"""A curve of time by amount of work, from noisy samples."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median

MAX_SAMPLES = 32
MIN_SAMPLES = 3
_REDRAW_EVERY = 8
_FAR_FACTOR, _MAX_FAR = 4, 8
"""From which multiple of the known x on a point counts as far, and how many far points are kept."""
STALL = 3.0
"""A step that took more than this many times the median was delayed by something else, and its time is cut to that."""

Point = tuple[int, int, float]
"""(n, x, seconds): the time of x units of work in a group of n."""


def typical_time(samples: Collection[float]) -> float:
    """The mean, because many steps together take the sum of their times. A sample above STALL times the median is cut to that."""
    longest = STALL * median(samples)
    return sum(min(seconds, longest) for seconds in samples) / len(samples)


def undisturbed_time(samples: Collection[float]) -> float:
    """The lower quartile, for work that is the same every time. On a shared machine, means depend more on when a kind of step was
    measured than on the kind itself. A kind that was only measured while the machine was busy would look expensive, would not be
    chosen, and would never be measured again."""
    return sorted(samples)[len(samples) // 4]


class Curve:
    """Seconds by x, for groups of n: a non-decreasing, piecewise linear function through the last few samples at each x.

    slope: if only a single x is known and no far point, the share of its time that one more x adds.
    statistic: reduces the samples of a point to one time.
    """

    def __init__(self, slope: float, statistic: Callable[[Collection[float]], float] = typical_time) -> None:
        self._slope = slope
        self._statistic = statistic
        self._far: deque[tuple[int, float]] = deque(maxlen=_MAX_FAR)
        self._samples: dict[int, dict[int, deque[float]]] = {}
        self._stored: Curve | None = None
        self._lowest: dict[int, int] = {}  # the lowest x of each n
        self._lines: dict[int, tuple[list[int], list[float]]] = {}
        self._point_times: dict[tuple[int, int], float] = {}
        self._num_added = 0

    def add(self, n: int, x: int, seconds: float) -> None:
        samples = self._samples.setdefault(n, {}).setdefault(x, deque(maxlen=MAX_SAMPLES))
        samples.append(seconds)
        self._lowest[n] = min(x, self._lowest.get(n, x))
        self._point_times.pop((n, x), None)
        self._num_added += 1
        # computing a line can take as long as a step of a small model, so one with known points is updated only now and then
        if len(samples) <= MIN_SAMPLES or self._num_added % _REDRAW_EVERY == 0:
            self._lines.pop(n, None)

    def add_far(self, x: int, seconds: float) -> None:
        """Add a time for a large x of another kind of work with a similar time per unit. It guides the slope until a second x is
        measured."""
        self._far.append((x, seconds))

    def add_points(self, points: Iterable[Point], factor: float = 1.0) -> None:
        """Use the points() of another curve, with times multiplied by a factor, where this curve has too few samples. Each point counts
        like a few samples. Once something was measured in a group, its points are all rescaled to that: if the machine was busy when they
        were measured, all of them are too slow."""
        self._stored = self._stored or Curve(self._slope)
        for n, x, seconds in points:
            self._stored.add(n, x, factor * seconds)
            self._lowest[n] = min(x, self._lowest.get(n, x))
            self._lines.pop(n, None)

    def num_samples(self, n: int, x: int) -> int:
        """The number of samples that are kept, at most MAX_SAMPLES. A point of another curve counts as MIN_SAMPLES."""
        number = len(self._samples.get(n, {}).get(x, ()))
        return max(number, MIN_SAMPLES) if self._stored is not None and self._stored.num_samples(n, x) else number

    def mean_at(self, n: int, x: int) -> float | None:
        """The mean of the samples at this point, including disturbed ones; None if there are none."""
        samples = self._samples.get(n, {}).get(x)
        return typical_time(samples) if samples else None

    def at(self, n: int, x: float) -> float | None:
        """The time of x in a group of n; None if nothing was measured. If this n was not measured, or not down to x, the nearest n that
        was is used instead."""
        if not self._lowest:
            return None
        lowest = self._lowest
        if n not in lowest or lowest[n] > x:
            n = min(lowest, key=lambda known: (lowest[known] > x, abs(known - n) / max(known, n)))
        xs, seconds = self._line(n)
        if len(xs) == 1:
            return max(seconds[0] + self._guessed_rise(xs[0], seconds[0]) * (x - xs[0]), 0.1 * seconds[0])
        right = min(max(bisect_left(xs, x), 1), len(xs) - 1)
        left = right - 1
        if x > xs[-1]:  # beyond the measured range the rise between two neighbours is unreliable
            left = 0
        rise = (seconds[right] - seconds[left]) / (xs[right] - xs[left])
        anchor = right if x > xs[-1] else left
        return max(seconds[anchor] + rise * (x - xs[anchor]), 0.1 * seconds[0])

    def _guessed_rise(self, known: int, seconds: float) -> float:
        """The time that one more x adds: the least slope of the lines to the far points, since first passes are slow."""
        rises = [(far - seconds) / (x - known) for x, far in self._far if x >= _FAR_FACTOR * known]
        return max(min(rises), 0.0) if rises else self._slope * seconds

    def points(self) -> Iterator[Point]:
        """(n, x, seconds) of every known point."""
        for n in self._lowest:
            xs, seconds = self._line(n)
            yield from ((n, x, t) for x, t in zip(xs, seconds, strict=True))

    def _line(self, n: int) -> tuple[list[int], list[float]]:
        """The points of the line for n. A point needs a few samples to count, unless no point has that many."""
        if n not in self._lines:
            measured = self._measured(n)
            known = self._rescaled(n, measured) | measured or self._measured(n, min_samples=1)
            xs = sorted(known)
            times = _non_decreasing([known[x][0] for x in xs], [known[x][1] for x in xs])
            self._lines[n] = xs, times
        return self._lines[n]

    def _measured(self, n: int, min_samples: int = MIN_SAMPLES) -> dict[int, tuple[float, int]]:
        """By x, the time and the number of samples."""
        samples = self._samples.get(n, {})
        return {x: (self._point_time(n, x), len(each)) for x, each in samples.items() if len(each) >= min_samples}

    def _rescaled(self, n: int, measured: Mapping[int, tuple[float, int]]) -> dict[int, tuple[float, int]]:
        """The stored points, multiplied by the typical ratio of the measured times to those of the stored curve."""
        if self._stored is None or n not in self._stored._lowest:
            return {}
        pairs = [(seconds, self._stored.at(n, x)) for x, (seconds, _) in measured.items()]
        ratios = [seconds / before for seconds, before in pairs if before]
        ratio = median(ratios) if ratios else 1.0
        return {x: (ratio * seconds, MIN_SAMPLES) for x, seconds in zip(*self._stored._line(n), strict=True)}

    def _point_time(self, n: int, x: int) -> float:
        if (n, x) not in self._point_times:
            self._point_times[n, x] = self._statistic(self._samples[n][x])
        return self._point_times[n, x]


def _non_decreasing(values: Sequence[float], weights: Sequence[int]) -> list[float]:
    """Isotonic regression: the nearest non-decreasing sequence by weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            pool_mean, pool_weight, pool_count = pools.pop()
            mean = (mean * total + pool_mean * pool_weight) / (total + pool_weight)
            total, count = total + pool_weight, count + pool_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
