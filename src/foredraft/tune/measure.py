"""Plain decoding and every drafter at a few depths, step by step in turn, on the workload, with every step on record."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt

from foredraft.bench import Configuration, Question, Workload
from foredraft.bench.configurations import Contender, contenders_for
from foredraft.bench.runner import hold_together, in_order, run_group, warm_up
from foredraft.equipment import name_of
from foredraft.llm import LLM
from foredraft.proposal import Drafter
from foredraft.sampling import SamplingParams
from foredraft.tune.rounds import Recorder, Trial

MOST_PASSES = 5


@dataclass(slots=True)
class Measurement:
    """trials: by drafter's name, batch size and depth; plain decoding is depth 0 of the drafter "none".

    methods: the drafters by name.
    """

    methods: dict[str, str | Drafter]
    batch_sizes: tuple[int, ...]
    trials: dict[tuple[str, int, int], list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def plain(self, batch_size: int) -> list[Trial]:
        return self.trials["none", batch_size, 0]

    def drafted(self, method: str, batch_size: int) -> dict[int, list[Trial]]:
        """By depth."""
        return {
            depth: trials
            for (name, size, depth), trials in self.trials.items()
            if (name, size) == (method, batch_size) and depth
        }


def depths_for(most: int) -> list[int]:
    """The depths to run: 1 and the most, where predictions would otherwise lie outside, and one between."""
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
) -> Measurement:
    """most: draft tokens of a step. budget: seconds; one round is run in any case, and a few passes are the most."""
    found = Measurement({name_of(method): method for method in methods}, tuple(batch_sizes))
    fields = [_Field.of(llm, methods, size, most, workload, params) for size in batch_sizes]
    for one in fields:
        warm_up(one.contenders, one.groups[0], params)
        one.forget()
    num_rounds = max(len(one.groups) for one in fields)
    started, spent = time.perf_counter(), 0.0
    for number in range(MOST_PASSES * num_rounds):
        repeat, place = divmod(number, num_rounds)
        for one in fields:
            for group in one.due(place, num_rounds):
                one.run(group, repeat, params, found)
        before, spent = spent, time.perf_counter() - started
        progress(min(1.0, max(spent / budget, (number + 1) / (MOST_PASSES * num_rounds))) if budget > 0 else 1.0)
        if spent + (spent - before) > budget:
            break
    return found


@dataclass(frozen=True, slots=True)
class _Field:
    """All that runs at one batch size. are_together: whether they take turns step by step."""

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
    ) -> _Field:
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
        """The groups whose turn it is: those of every batch size are spread over the rounds of a pass."""
        num = len(self.groups)
        yield from range(-(-place * num // num_rounds), -(-(place + 1) * num // num_rounds))

    def run(self, group: int, repeat: int, params: SamplingParams, into: Measurement) -> None:
        order = in_order(self.contenders, group + repeat * len(self.groups))
        found = run_group(order, self.groups[group], params, group, repeat, together=self.are_together)
        runs = {run.configuration: run for run in found}
        for contender, recorder in zip(self.contenders, self.recorders, strict=True):
            own, run = contender.configuration, runs[contender.name]
            openings, rounds = recorder.take()
            depth = own.speculative_tokens if isinstance(own.speculative_tokens, int) else 0
            name = name_of(own.method or "none")
            into.trials[name, own.batch_size, depth].append(
                Trial(group, run.num_tokens, run.seconds, openings, rounds, run.category)
            )


def settings_for(params: SamplingParams | None, max_tokens: int) -> SamplingParams:
    """Greedy where nothing is given; γ is what is to be found out."""
    return replace(params or SamplingParams(max_tokens=max_tokens, temperature=0.0), speculative_tokens=None)
