"""The result of a benchmark, and the comparisons that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from foredraft.bench.configurations import Configuration
from foredraft.bench.environment import Environment
from foredraft.bench.figures import Figures, first_difference
from foredraft.bench.records import Answer, GroupRun
from foredraft.bench.statistics import Ratio, Samples, median_repeats, median_with_interval, ratio_of_rates
from foredraft.bench.workload import Workload
from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two texts. turn, position: from 0. ours, theirs: the token ids there; None after the end."""

    question_id: str
    turn: int
    position: int
    ours: int | None
    theirs: int | None


@dataclass(frozen=True, slots=True)
class Identity:
    """How many answers are identical to the other configuration's, token for token, and the first difference."""

    num_answers: int
    num_identical: int
    first_difference: Difference | None

    @property
    def share(self) -> float:
        return self.num_identical / self.num_answers


@dataclass(frozen=True, slots=True)
class Comparison:
    """One configuration compared with another, on the same questions at the same time.

    speedup: of tokens per second, totals over totals, with the bootstrap 95 % interval over groups of questions.
    median_speedup: the median over groups of the paired ratios (a group's ratio is the median over its repeats).
    spec_bench_speedup: the ratio of the mean tokens per second of answers. identity: None if the texts need not agree
    (sampling without a seed).
    """

    configuration: str
    baseline: str
    speedup: Ratio
    median_speedup: Ratio
    spec_bench_speedup: float
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """runs: in chronological order; every configuration has the same groups and repeats.

    params: of every request, except its draft length. is_promised: whether all configurations must write the same text.
    are_together: whether they took turns step by step rather than group by group. cut: what the budget had no room for, and
    warnings: what makes the figures unrepresentative, one line each.
    """

    configurations: tuple[Configuration, ...]
    workload: Workload
    params: SamplingParams
    is_promised: bool
    are_together: bool
    environment: Environment
    runs: tuple[GroupRun, ...]
    cut: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [configuration.name for configuration in self.configurations]

    @property
    def baseline(self) -> str:
        return self.names[0]

    @property
    def categories(self) -> list[str]:
        """The categories that were measured."""
        return list(dict.fromkeys(run.category for run in self.runs))

    def runs_of(self, name: str, category: str | None = None) -> list[GroupRun]:
        """The runs in order of group, then repeat. Raises ForedraftError for a name or a category that was not measured."""
        if name not in self.names:
            raise ForedraftError(f"configuration {name!r} was not measured: choose from {', '.join(self.names)}")
        runs = [run for run in self.runs if run.configuration == name and category in (None, run.category)]
        if not runs:
            raise ForedraftError(f"category {category!r} was not measured: choose from {', '.join(self.categories)}")
        return sorted(runs, key=lambda run: (run.group, run.repeat))

    def figures(self, name: str, category: str | None = None) -> Figures:
        return Figures.of(self.runs_of(name, category))

    def typical_speedup(self, name: str, baseline: str) -> Ratio:
        """The speedup of `compare`, made robust against disturbances: for each group, only the median paired ratio of its repeats
        counts. The interval assumes prompts with the same proportions of categories, so it is narrower if categories differ."""
        ours, theirs = self.runs_of(name), self.runs_of(baseline)
        kinds = {run.group: run.category for run in ours}
        typical = Samples.of([(run.num_tokens, run.seconds) for run in median_repeats(theirs)])
        ratios = np.array(_paired_ratios(ours, theirs))
        as_fast = Samples(typical.tokens, typical.seconds / ratios)
        return ratio_of_rates(as_fast, typical, list(kinds.values()))

    def compare(self, name: str, category: str | None = None, baseline: str | None = None) -> Comparison:
        """baseline: None for the first configuration."""
        against = baseline or self.baseline
        ours, theirs = self.runs_of(name, category), self.runs_of(against, category)
        return Comparison(
            configuration=name,
            baseline=against,
            speedup=ratio_of_rates(_by_group(ours), _by_group(theirs)),
            median_speedup=median_with_interval(_paired_ratios(ours, theirs)),
            spec_bench_speedup=Figures.of(ours).spec_bench_tokens_per_second
            / Figures.of(theirs).spec_bench_tokens_per_second,
            identity=_identity(ours, theirs) if self.is_promised else None,
        )


def _by_group(runs: Sequence[GroupRun]) -> Samples:
    """One sample per group: its repeats are not independent."""
    sums: dict[int, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for run in runs:
        tokens, seconds = sums[run.group]
        sums[run.group] = tokens + run.num_tokens, seconds + run.seconds
    return Samples.of(list(sums.values()))


def _paired_ratios(ours: Sequence[GroupRun], theirs: Sequence[GroupRun]) -> list[float]:
    by_group: dict[int, list[float]] = defaultdict(list)
    for a, b in zip(ours, theirs, strict=True):
        by_group[a.group].append((a.num_tokens / a.seconds) / (b.num_tokens / b.seconds))
    return [median(ratios) for ratios in by_group.values()]


def _identity(ours: Sequence[GroupRun], theirs: Sequence[GroupRun]) -> Identity:
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.answers, b.answers, strict=True)]
    differences = [difference for a, b in pairs if (difference := _difference(a, b)) is not None]
    return Identity(len(pairs), len(pairs) - len(differences), differences[0] if differences else None)


def _difference(ours: Answer, theirs: Answer) -> Difference | None:
    for number, (a, b) in enumerate(zip(ours.turns, theirs.turns, strict=True)):
        position = first_difference(a.token_ids, b.token_ids)
        if position is not None:
            return Difference(
                ours.question_id, number, position, _at(a.token_ids, position), _at(b.token_ids, position)
            )
    return None


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
