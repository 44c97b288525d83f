"""Predicts the speed at every γ from runs at a few, by the model of arXiv:2211.17192 with measured verification times: tokens of a
round, E[τ] = 1 + Σ_k Π_{i≤k} α_i, over its seconds, γ·draft + v(rows). Uses neither language models nor a clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.bench import Configuration
from foredraft.bench.statistics import Floats, Indices, Ratio, bootstrap, median_repeats
from foredraft.errors import ForedraftError
from foredraft.tune.costs import StepCosts
from foredraft.tune.rounds import Trial


@dataclass(frozen=True, slots=True)
class Prediction:
    """tokens_per_second: of all texts of a batch together. speedup: over plain decoding with the same batch size."""

    configuration: Configuration
    tokens_per_second: float
    speedup: Ratio


class PlainSpeed:
    """Plain decoding as measured, without stalls. trials: only the median one of a group's repeats counts."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        costs = StepCosts(one for trial in trials for one in trial.rounds)
        trials = median_repeats(trials)
        self.num_groups = _num_groups(trials)
        kinds = {trial.group: trial.category for trial in trials}
        self.categories = [kinds[group] for group in range(self.num_groups)]
        self._tokens = _by_group(trials, [float(trial.num_tokens) for trial in trials])
        stalls = [sum(one.seconds - costs.usual_seconds(one) for one in trial.rounds) for trial in trials]
        self._seconds = _by_group(trials, [t.seconds - stall for t, stall in zip(trials, stalls, strict=True)])

    def rate(self, drawn: Indices) -> Floats:
        """Tokens per second of resampled groups. drawn: [R, N] -> [R]"""
        rates: Floats = _sums(self._tokens, drawn) / _sums(self._seconds, drawn)
        return rates


class Predictor:
    """One drafter at one batch size. runs: by requested depth, at least 1, with the same groups at each.

    A draft cut to γ tokens emits min(accepted, γ) + 1 tokens, so a run at one depth gives E[τ] for every smaller γ, except for
    one effect: with shorter drafts, more rounds begin where the text is easy. The size of this effect is known at the depths
    that were run, and interpolated linearly between them.
    """

    def __init__(self, runs: Mapping[int, Sequence[Trial]]) -> None:
        if not runs or min(runs) < 1:
            raise ForedraftError(f"a prediction needs runs with drafts, but the depths are {sorted(runs)}")
        self._costs = StepCosts(one for trials in runs.values() for trial in trials for one in trial.rounds)
        self._runs = {depth: median_repeats(trials) for depth, trials in sorted(runs.items())}
        self._known: dict[tuple[int, int], _Sums] = {}

    @property
    def max_depth(self) -> int:
        return max(self._runs)

    def rate(self, speculative_tokens: int, drawn: Indices) -> Floats:
        """Tokens per second of resampled groups. drawn: [R, N] -> [R]"""
        depth = min(d for d in self._runs if d >= speculative_tokens)
        sums = self._sums(depth, speculative_tokens)
        pace = sums.pace(drawn) * self._correction(depth, speculative_tokens, drawn)
        tokens = _sums(sums.tokens, drawn)
        left = np.maximum(tokens - _sums(sums.opening_tokens, drawn), 0.0)
        rates: Floats = tokens / (_sums(sums.opening_seconds, drawn) + left * pace)
        return rates

    def verify_curve(self, num_sequences: int, most: int) -> list[float]:
        """Seconds of a step without its drafting, for 0, 1, ... draft tokens per sequence."""
        return [self._costs.verify_seconds(num_sequences, num_sequences * (1 + g)) for g in range(most + 1)]

    def draft_curve(self, num_requests: int, most: int) -> list[float]:
        """Seconds to draft 1, 2, ... tokens for this many requests."""
        return [self._costs.draft_seconds(num_requests, depth) for depth in range(1, most + 1)]

    def _correction(self, depth: int, speculative_tokens: int, drawn: Indices) -> Floats | float:
        below = max((d for d in self._runs if d < depth), default=None)
        if below is None or depth == speculative_tokens:
            return 1.0
        before, after = self._sums(below, below).pace(drawn), self._sums(depth, below).pace(drawn)
        ratio = np.divide(before, after, out=np.ones_like(before), where=after > 0)  # no token follows the prompts
        share = (depth - speculative_tokens) / (depth - below)
        corrections: Floats = 1.0 + share * (ratio - 1.0)
        return corrections

    def _sums(self, depth: int, speculative_tokens: int) -> _Sums:
        key = depth, speculative_tokens
        if key not in self._known:
            self._known[key] = _Sums.of(self._runs[depth], speculative_tokens, self._costs)
        return self._known[key]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over a run, by group, as if at most γ tokens had been requested. [N] each

    opening_*: of the steps in which prompts were read, and of the time outside all steps.
    """

    tokens: Floats
    opening_tokens: Floats
    opening_seconds: Floats
    round_tokens: Floats
    round_seconds: Floats

    @classmethod
    def of(cls, trials: Sequence[Trial], gamma: int, costs: StepCosts) -> _Sums:
        columns: list[list[float]] = [[] for _ in range(5)]
        for trial in trials:
            steps = [*trial.openings, *trial.rounds]
            rest = trial.seconds - sum(one.seconds for one in steps)
            values = (
                trial.num_tokens,
                sum(one.num_tokens(gamma) for one in trial.openings),
                rest + sum(one.seconds + costs.difference(one, gamma) for one in trial.openings),
                sum(one.num_tokens(gamma) for one in trial.rounds),
                sum(costs.usual_seconds(one) + costs.difference(one, gamma) for one in trial.rounds),
            )
            for column, value in zip(columns, values, strict=True):
                column.append(float(value))
        return cls(*(_by_group(trials, column) for column in columns))

    def pace(self, drawn: Indices) -> Floats:
        """Seconds per token after the prompts are read; 0 if no token follows."""
        tokens = _sums(self.round_tokens, drawn)
        paces: Floats = _sums(self.round_seconds, drawn) / np.where(tokens == 0, np.inf, tokens)
        return paces


def predict(predictor: Predictor, plain: PlainSpeed, configuration: Configuration) -> Prediction:
    """configuration: with speculative_tokens from 1 to the largest depth that was run.

    The interval is the percentile bootstrap's over groups of questions, with fixed proportions of the categories. Costs are
    not resampled. Raises ForedraftError for any other speculative_tokens.
    """
    gamma = configuration.speculative_tokens
    if not isinstance(gamma, int) or not 1 <= gamma <= predictor.max_depth:
        raise ForedraftError(f"{configuration.name}: predictions cover 1 to {predictor.max_depth} draft tokens")

    def ratios(drawn: Indices) -> Floats:
        return predictor.rate(gamma, drawn) / plain.rate(drawn)

    everything = np.arange(plain.num_groups)[None]
    speedup = Ratio(float(ratios(everything)[0]), bootstrap(plain.num_groups, ratios, strata=plain.categories))
    return Prediction(configuration, float(predictor.rate(gamma, everything)[0]), speedup)


def _num_groups(trials: Sequence[Trial]) -> int:
    return 1 + max(trial.group for trial in trials)


def _by_group(trials: Sequence[Trial], values: Sequence[float]) -> Floats:
    sums = np.zeros(_num_groups(trials))
    np.add.at(sums, [trial.group for trial in trials], values)
    return sums


def _sums(values: Floats, drawn: Indices) -> Floats:
    sums: Floats = values[drawn].sum(-1)
    return sums
