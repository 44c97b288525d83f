"""Runs plain decoding and every drafter at a few depths on the workload, taking turns step by step, and records every step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt

from foredraft.bench import Configuration, Question, Workload
from foredraft.bench.budget import Clock, Now
from foredraft.bench.configurations import Contender, contenders_for
from foredraft.bench.runner import fit_to_budget, hold_together, in_order, run_group
from foredraft.engine.methods import name_of
from foredraft.engine.proposal import Drafter
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.tune.rounds import Recorder, Trial

MOST_PASSES = 5


@dataclass(slots=True)
class Measurement:
    """trials: by the drafter's name, batch size and depth; plain decoding is depth 0 of the drafter "none".

    methods: the drafters by name. params: of every request; texts may be shorter than requested. left_out: candidates for
    which the budget had no room.
    """

    methods: dict[str, str | Drafter]
    batch_sizes: tuple[int, ...]
    params: SamplingParams
    left_out: tuple[str, ...] = ()
    trials: dict[tuple[str, int, int], list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def plain(self, batch_size: int) -> list[Trial]:
        return self.trials["none", batch_size, 0]

    def drafted(self, method: str, batch_size: int) -> dict[int, list[Trial]]:
        """This drafter's trials by depth."""
        return {
            depth: trials
            for (name, size, depth), trials in self.trials.items()
            if (name, size) == (method, batch_size) and depth
        }

    def drop_unmeasured(self) -> None:
        """Keep only candidates that ran at every depth and batch size: the others cannot be compared."""
        depths = {depth for _, _, depth in self.trials if depth}
        complete = {
            name: method
            for name, method in self.methods.items()
            if all((name, size, depth) in self.trials for size in self.batch_sizes for depth in depths)
        }
        self.left_out = tuple(name for name in self.methods if name not in complete)
        self.methods = complete
        self.trials = defaultdict(
            list, {key: trials for key, trials in self.trials.items() if key[0] not in self.left_out}
        )


def depths_for(most: int) -> list[int]:
    """The depths to run: 1 and `most`, so that every prediction lies between them, and one in between."""
    return sorted({1, isqrt(most + 1), most})


def measure(
    llm: LLM,
    methods: Sequence[str | Drafter],
    batch_sizes: Sequence[int],
    workload: Workload,
    params: SamplingParams,
    *,
    most: int,
    budget: float,
    progress: Callable[[float], None],
    now: Now = time.perf_counter,
) -> Measurement:
    """Run plain decoding and every drafter at a few depths.

    most: the most draft tokens of a step. budget: seconds, warm-up included; at least one round and at most a few passes are
    run. If there is no time for one round, texts are shortened and only the candidates that ran in time are kept, always
    including the first. now: the clock of the budget.
    """
    clock = Clock(budget, None, 1, now=now)
    lineups = [_Lineup.of(llm, methods, size, most, workload, params) for size in batch_sizes]
    depths = len(depths_for(most))
    for lineup in lineups:
        params = fit_to_budget(lineup.contenders, lineup.groups[0], params, clock, 1 + depths)
        lineup.forget()
    measurement = Measurement({name_of(method): method for method in methods}, tuple(batch_sizes), params)
    num_rounds = max(len(lineup.groups) for lineup in lineups)
    longest = 0.0
    for number in range(MOST_PASSES * num_rounds):
        repeat, place = divmod(number, num_rounds)
        before = clock.spent
        for lineup in lineups:
            for group in lineup.due(place, num_rounds):
                lineup.run(group, repeat, measurement, clock, keep=None if number else 1 + depths)
        if not number:
            measurement.drop_unmeasured()
            lineups = [lineup.only(measurement.methods) for lineup in lineups]
        longest = max(longest, clock.spent - before)
        progress(min(1.0, max(clock.spent / budget, (number + 1) / (MOST_PASSES * num_rounds))))
        if clock.spent + longest > budget:
            break
    return measurement


@dataclass(frozen=True, slots=True)
class _Lineup:
    """The contenders of one batch size. are_together: whether they take turns step by step."""

    contenders: list[Contender]
    recorders: list[Recorder]
    groups: list[tuple[Question, ...]]
    are_together: bool

    @classmethod
    def of(
        cls,
        llm: LLM,
        methods: Sequence[str | Drafter],
        batch_size: int,
        most: int,
        workload: Workload,
        params: SamplingParams,
    ) -> _Lineup:
        drafted = [Configuration(method, depth, batch_size) for method in methods for depth in depths_for(most)]
        contenders = contenders_for(llm, [Configuration.plain(batch_size), *drafted])
        recorders = [Recorder(contender.stopwatch.seconds) for contender in contenders]
        for contender, recorder in zip(contenders, recorders, strict=True):
            contender.llm.engine.observers.append(recorder)
        groups = workload.groups(batch_size)
        return cls(contenders, recorders, groups, hold_together(contenders, groups, params))

    def forget(self) -> None:
        for recorder in self.recorders:
            recorder.take()

    def due(self, place: int, num_rounds: int) -> Iterator[int]:
        """The groups to run in this round: the groups of every batch size are spread evenly over the rounds of a pass."""
        num = len(self.groups)
        yield from range(-(-place * num // num_rounds), -(-(place + 1) * num // num_rounds))

    def only(self, methods: Collection[str]) -> _Lineup:
        """The same lineup with only these drafters and plain decoding."""
        kept = [
            pair
            for pair in zip(self.contenders, self.recorders, strict=True)
            if pair[0].configuration.is_plain or name_of(pair[0].configuration.method or "none") in methods
        ]
        return replace(self, contenders=[one for one, _ in kept], recorders=[one for _, one in kept])

    def run(self, group: int, repeat: int, into: Measurement, clock: Clock, keep: int | None) -> None:
        """keep: how many contenders run even if the budget is overdrawn; None: an overdrawn round is dropped."""
        order = in_order(self.contenders, group + repeat * len(self.groups) if keep is None else 0)
        questions = self.groups[group]
        group_runs = run_group(
            order, questions, into.params, group, repeat, together=self.are_together, clock=clock, keep=keep
        )
        runs = {run.configuration: run for run in group_runs or ()}
        for contender, recorder in zip(self.contenders, self.recorders, strict=True):
            openings, rounds = recorder.take()
            run = runs.get(contender.name)
            if run is None:
                continue
            configuration = contender.configuration
            tokens = configuration.speculative_tokens
            depth = tokens if isinstance(tokens, int) else 0
            name = name_of(configuration.method or "none")
            into.trials[name, configuration.batch_size, depth].append(
                Trial(group, run.num_tokens, run.seconds, openings, rounds, run.category)
            )


def settings_for(params: SamplingParams | None, max_tokens: int) -> SamplingParams:
    """The parameters, greedy by default, without a number of draft tokens, which is what tuning determines."""
    return replace(params or SamplingParams(max_tokens=max_tokens, temperature=0.0), speculative_tokens=None)
