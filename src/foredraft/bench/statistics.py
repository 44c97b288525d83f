"""Ratios with confidence intervals. The prompts are what varies, so the bootstrap resamples prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

R = TypeVar("R", bound="Repeat")

LEVEL = 0.95
_ROUNDS = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """num: the number of values."""

    p50: float
    p95: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None if there are no values."""
        if not values:
            return None
        p50, p95 = np.percentile(values, [50, 95])
        return cls(float(p50), float(p95), len(values))


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens generated and seconds taken, [N] each: one pair per sample."""

    tokens: Floats
    seconds: Floats

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Samples:
        columns = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        return cls(columns[:, 0], columns[:, 1])

    def rate(self, drawn: Indices) -> Floats:
        """Tokens per second of all samples of a draw together. drawn: [R, N] -> [R]"""
        rates: Floats = self.tokens[drawn].sum(-1) / self.seconds[drawn].sum(-1)
        return rates


class Repeat(Protocol):
    """One run of a group of prompts, which may be repeated. num_tokens, seconds: of the whole run."""

    @property
    def group(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def seconds(self) -> float: ...


def median_repeats(repeats: Sequence[R]) -> list[R]:
    """Of each group the repeat with the median speed (of two, the faster one), so that a single disturbance does not count. In the order
    of the groups."""
    by_group: dict[int, list[R]] = {}
    for repeat in repeats:
        by_group.setdefault(repeat.group, []).append(repeat)
    ranked = [sorted(by_group[group], key=lambda one: one.seconds / one.num_tokens) for group in sorted(by_group)]
    return [of_group[(len(of_group) - 1) // 2] for of_group in ranked]


def bootstrap(
    num: int,
    statistic: Callable[[Indices], Floats],
    *,
    strata: Sequence[str] | None = None,
    rounds: int = _ROUNDS,
    seed: int = 0,
) -> Interval | None:
    """The percentile bootstrap's 95 % interval (Efron 1979). statistic: [R, num] indices of drawn samples -> [R] values.

    strata: the kind of each sample, if other samples would have the same proportions of kinds: each draw then keeps them. Kinds
    with a single sample are drawn together. The result is None for fewer than two samples.
    """
    if num < 2:
        return None
    generator = np.random.default_rng(seed)
    parts = [generator.choice(members, size=(rounds, len(members))) for members in _strata(num, strata)]
    drawn = np.concatenate(parts, axis=1)
    low, high = np.quantile(statistic(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _strata(num: int, kinds: Sequence[str] | None) -> list[list[int]]:
    """The groups of samples within which samples are drawn."""
    if kinds is None:
        return [list(range(num))]
    of_kind = [[i for i, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)]
    single = [i for members in of_kind if len(members) == 1 for i in members]
    if len(single) == 1:  # a stratum of one sample would count as certain
        return [list(range(num))]
    return [*(members for members in of_kind if len(members) > 1), *([single] if single else [])]


@dataclass(frozen=True, slots=True)
class Ratio:
    """interval: None if there was only one sample."""

    value: float
    interval: Interval | None


def ratio_of_rates(ours: Samples, theirs: Samples, strata: Sequence[str] | None = None) -> Ratio:
    """The total tokens per second of `ours` over those of `theirs`. Sample i of both has the same prompts. strata: see bootstrap."""

    def ratios(drawn: Indices) -> Floats:
        return ours.rate(drawn) / theirs.rate(drawn)

    num = len(ours.tokens)
    return Ratio(float(ratios(np.arange(num)[None])[0]), bootstrap(num, ratios, strata=strata))


def median_with_interval(values: Sequence[float]) -> Ratio:
    """values: one for each prompt, such as paired ratios. A single disturbed run does not move the median."""
    samples = np.array(values)

    def medians(drawn: Indices) -> Floats:
        drawn_medians: Floats = np.median(samples[drawn], axis=-1)
        return drawn_medians

    return Ratio(float(np.median(samples)), bootstrap(len(samples), medians))
