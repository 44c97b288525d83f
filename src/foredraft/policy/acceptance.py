"""Estimates the acceptance rate of each draft token, by its position in the draft and by the text's recent acceptance.

The rate at position j is a share of the drafts whose tokens before j were all accepted: the share in which token j existed and
was accepted too. A lookup that found nothing counts as a rejection, since its time was spent all the same.

Counts are kept in buckets: a text is new, or was not drafted for a long time, or has some level of recent acceptance. A bucket's
counts come from all texts of the process that were in it. So forecasts are calibrated by what happened to texts in the same state:
how soon a text with low acceptance recovers is counted, not assumed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from foredraft.policy.decay import PRIOR_WEIGHT, Decay, Numbers

NEW, STALE, FIRST_LEVEL = 0, 1, 2
"""The buckets of texts that were never drafted, or not for a long time. Those for levels of recent acceptance follow."""
_LEVELS = (0.1, 0.35, 0.6, 0.85)
_LEVEL_RATES = tuple((low + high) / 2 for low, high in pairwise((0.0, *_LEVELS, 1.0)))
_LEVEL_PRIOR_WEIGHT = 5.0
"""The weight of the assumed rate of a level, in drafts. If it were larger, a text that turns bad would be noticed later."""
_OPTIMISM = 0.5
"""By how many standard errors a forecast exceeds what was counted, as in bandits (upper confidence bounds): a rate that is too low by
chance is not corrected otherwise, since nothing is drafted then. If it were larger, a text that turns bad would be noticed later."""
STORED_DRAFTS = 16
"""The weight of a level's counts from an earlier process: at most that of so many drafts."""
NUM_BUCKETS = FIRST_LEVEL + len(_LEVELS) + 1

_INITIAL_RATE = 0.85
"""The assumed acceptance rate of a drafter before anything was counted. It is optimistic: a drafter that is never tried is never
measured, and a few drafts cost little."""
_STALE_AFTER = 16
_SCORE_RATE, _FIRST_SCORE_RATE = 0.3, 0.5
"""The weight of the last draft in a text's score. The first draft, and the first after a long time, weigh more, but not fully: in
two of five texts with high acceptance the first token is rejected."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The expected results of drafts of 0, 1, 2, ... tokens. num_tokens[g]: emitted tokens, the target's own included, with a budget
    of g. num_rows[g]: draft tokens to verify."""

    num_tokens: list[float]
    num_rows: list[float]


@dataclass(slots=True)
class AcceptanceHistory:
    """The history of one sequence with one drafter. score: the share of its evaluated draft tokens that were accepted, as an
    exponential average; None before the first draft. last_draft: the step of the last draft. num_read: tokens that the drafter has
    read."""

    score: float | None = None
    last_draft: int = 0
    num_read: int = 0

    def bucket(self, step: int) -> int:
        if self.score is None:
            return NEW
        if step - self.last_draft > _STALE_AFTER:
            return STALE
        return FIRST_LEVEL + bisect_right(_LEVELS, self.score)

    def record(self, num_accepted: int, num_evaluated: int, step: int, estimator: AcceptanceEstimator) -> None:
        """Count one draft. estimator: of its drafter, which has not counted it yet."""
        rate = num_accepted / num_evaluated
        before = estimator.mean_rate if self.score is None else self.score
        weight = _FIRST_SCORE_RATE if self.bucket(step) in (NEW, STALE) else _SCORE_RATE
        self.score = before + weight * (rate - before)
        self.last_draft = step


@dataclass(slots=True)
class _Counts:
    """Decaying counts by position in the draft. evaluated, accepted: drafts whose token at this position was evaluated, and accepted.
    requested, drafted: drafts whose budget, and whose tokens, end at this position."""

    evaluated: list[float]
    accepted: list[float]
    requested: list[float]
    drafted: list[float]
    decay: Decay
    forecast: Forecast | None = field(default=None)

    @classmethod
    def zeros(cls, max_draft: int) -> _Counts:
        counts = [0.0] * max_draft, [0.0] * max_draft, [0.0] * max_draft, [0.0] * max_draft
        return cls(*counts, Decay(*counts))

    def record(self, max_draft: int, num_drafted: int, num_accepted: int) -> None:
        weight = self.decay.next_weight()
        self.requested[max_draft - 1] += weight
        if num_drafted:
            self.drafted[num_drafted - 1] += weight
        for position in range(min(num_accepted + 1, max_draft)):
            self.evaluated[position] += weight
        for position in range(num_accepted):
            self.accepted[position] += weight
        self.forecast = None

    def rates(self, prior: Sequence[float]) -> list[float]:
        """The rates by position. prior: the rate of each position before anything was counted there."""
        return self.decay.shares(self.accepted, self.evaluated, prior)

    def chained_rates(self, first: float, weight: float = PRIOR_WEIGHT) -> list[float]:
        """The rates by position. The prior of the first position is `first`; that of any other is the rate of the one before it. weight:
        of the priors, in drafts."""
        rates: list[float] = []
        for accepted, evaluated in zip(self.accepted, self.evaluated, strict=True):
            rates.append(self.decay.share(accepted, evaluated, rates[-1] if rates else first, weight))
        return rates

    def upper_bound(self, rate: float) -> float:
        """The rate of the first position plus some standard errors, which are 0 before anything was counted."""
        number = self.decay.number(self.evaluated[0])
        error = math.sqrt(number * rate * (1 - rate)) / (number + PRIOR_WEIGHT)
        return min(rate + _OPTIMISM * error, 1.0)

    def first_rate(self, prior: float) -> float:
        """The rate of the first position. prior: the rate before anything was counted."""
        return self.decay.share(self.accepted[0], self.evaluated[0], prior)

    def mean_rate(self, prior: float) -> float:
        """The rate over all positions. prior: the rate before anything was counted."""
        return self.decay.share(sum(self.accepted), sum(self.evaluated), prior)

    def fill_rates(self, prior: list[float]) -> list[float]:
        """For each position, of the drafts whose budget reaches it, the share that also had a token there."""
        shares, requested, drafted = list(prior), 0.0, 0.0
        for position in range(len(shares) - 1, -1, -1):
            requested += self.requested[position]
            drafted += self.drafted[position]
            shares[position] = self.decay.share(drafted, requested, prior[position])
        return shares


class LevelEstimator:
    """An estimator whose counts at each level can be kept for a later process. decays: of the counts of each bucket."""

    def __init__(self, decays: Sequence[Decay]) -> None:
        self._level_decays = decays[FIRST_LEVEL:]

    def levels(self) -> list[Numbers]:
        """The counts of each level, for a later process."""
        return [decay.numbers() for decay in self._level_decays]

    def restore(self, levels: Sequence[Numbers]) -> None:
        """Start from the levels() of an earlier process."""
        for decay, numbers in zip(self._level_decays, levels, strict=False):
            decay.restore(numbers, STORED_DRAFTS)


class AcceptanceEstimator(LevelEstimator):
    """One drafter's acceptance rates by bucket. max_draft: the longest draft."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft
        self._all = _Counts.zeros(max_draft)
        self._buckets = [_Counts.zeros(max_draft) for _ in range(NUM_BUCKETS)]
        super().__init__([counts.decay for counts in self._buckets])

    def record(self, bucket: int, max_draft: int, num_drafted: int, num_accepted: int) -> None:
        """Count one draft of a text in this bucket. Tokens beyond self.max_draft are not counted."""
        requested, drafted, accepted = max_draft, num_drafted, num_accepted
        if max_draft > self.max_draft:
            requested, drafted, accepted = (min(count, self.max_draft) for count in (requested, drafted, accepted))
        self._all.record(requested, drafted, accepted)
        self._buckets[bucket].record(requested, drafted, accepted)
        for affected in (NEW, STALE, max(bucket - 1, STALE)):  # their priors have changed
            self._buckets[affected].forecast = None

    @property
    def mean_rate(self) -> float:
        """The share of evaluated draft tokens that were accepted, over all texts."""
        return self._all.mean_rate(_INITIAL_RATE)

    def forecast(self, bucket: int) -> Forecast:
        counts = self._buckets[bucket]
        if counts.forecast is None:
            counts.forecast = self._compute_forecast(counts, self.rates(bucket))
        return counts.forecast

    def rates(self, bucket: int) -> list[float]:
        """The rates by position. For the prior of a level's bucket see _level_prior; that of the other two buckets is the rate over all
        texts."""
        if bucket >= FIRST_LEVEL:
            return self._buckets[bucket].chained_rates(self._level_prior(bucket), _LEVEL_PRIOR_WEIGHT)
        return self._buckets[bucket].rates(self._all.chained_rates(_INITIAL_RATE))

    def _level_prior(self, bucket: int) -> float:
        """The assumed rate of the first position at a level: half way from the middle of the level to what was counted one level above.

        A drafter that is right in half of all places is soon wrong several times in a row by chance. If that were taken at face value,
        nothing would be drafted at the lowest level, and nothing would ever be counted there.
        """
        middle, above = _LEVEL_RATES[bucket - FIRST_LEVEL], bucket + 1
        return (middle + self._buckets[above].first_rate(middle)) / 2 if above < NUM_BUCKETS else middle

    def _compute_forecast(self, counts: _Counts, rates: Sequence[float]) -> Forecast:
        """The forecast is optimistic in the first position (_OPTIMISM)."""
        fill_rates = counts.fill_rates(self._all.fill_rates([1.0] * self.max_draft))
        num_tokens, num_rows, survival = [1.0], [0.0], 1.0
        for position, rate in enumerate([counts.upper_bound(rates[0]), *rates[1:]]):
            survival *= rate
            num_tokens.append(num_tokens[-1] + survival)
            num_rows.append(num_rows[-1] + max(fill_rates[position], survival))
        return Forecast(num_tokens, num_rows)
