"""The few best of the predictions, run against plain decoding; and what to use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import exp, fsum, log, sqrt

from foredraft.bench import BenchResult, Configuration, Interval, Ratio, Workload, built_in_workload, run_bench
from foredraft.bench.budget import Now, told
from foredraft.bench.runner import check_fits, check_settings
from foredraft.drafters import REGISTRY
from foredraft.engine.methods import NO_DRAFT, name_of
from foredraft.engine.proposal import Drafter
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import AUTO, SamplingParams
from foredraft.tune.measure import Measurement, measure, settings_for
from foredraft.tune.predict import PlainSpeed, Prediction, Predictor, predict

DEFAULT_TOKENS = 64
MOST_DRAFT_TOKENS = 8
_LOOKUPS = ("suffix", "ngram")
_MEASURING, _CHECKING = 0.5, 0.92
"""Of the budget: the share that goes into what predictions rest on, and the share by which everything is to be run."""
WORTH, RISK = 1.03, 0.95
"""The least speedup to expect of a setting that is advised, and the least that its interval may leave possible: prompts
differ, and an interval over a few dozen of them is often wider than what is to be won."""
_LEAST = 1e-3
"""Seconds that are left for running finalists when the budget is spent: each is run once all the same."""
_NUM_FINALISTS = 3
_MOST_PASSES = 12
_NEAR = 0.9

Setting = tuple[str, int | str]
"""Drafter and number of draft tokens, whatever the batch size."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """What was run. predicted: None where there is no prediction ("auto" decides on the way). measured: speedup over plain
    decoding of the same batch size, same questions."""

    configuration: Configuration
    predicted: Prediction | None
    measured: Ratio
    tokens_per_second: float

    @property
    def expected(self) -> Ratio:
        """The geometric mean of both, bounds alike: the same prompts, and two measurements of their times."""
        if self.predicted is None:
            return self.measured
        ours, theirs = self.measured, self.predicted.speedup
        if ours.interval is None or theirs.interval is None:
            return Ratio(sqrt(ours.value * theirs.value), None)
        bounds = zip(astuple(ours.interval), astuple(theirs.interval), strict=True)
        return Ratio(sqrt(ours.value * theirs.value), Interval(*(sqrt(max(a * b, 0.0)) for a, b in bounds)))


@dataclass(frozen=True, slots=True)
class Advice:
    """configuration: what to use; its batch size says nothing. is_plain: whether that is not to speculate.

    of: the measurements behind it, one for each batch size: of what is advised, or of the best that was not good enough.
    """

    configuration: Configuration
    of: tuple[Finalist, ...]

    @property
    def is_plain(self) -> bool:
        return self.configuration.is_plain


@dataclass(frozen=True, slots=True)
class TuneResult:
    """predictions: of every drafter, γ and batch size, the best first within each batch size. bench: of the finalists.

    num_groups: how many groups of questions the predictions rest on, by batch size. seconds: all of it together. cut: what
    the budget had no room for, in lines.
    """

    predictions: tuple[Prediction, ...]
    finalists: tuple[Finalist, ...]
    advice: Advice
    bench: BenchResult
    num_groups: Mapping[int, int]
    seconds: float
    budget: float
    cut: tuple[str, ...] = ()


def run_tune(
    llm: LLM,
    methods: Sequence[str | Drafter] | None = None,
    batch_sizes: Sequence[int] = (1,),
    workload: Workload | None = None,
    params: SamplingParams | None = None,
    *,
    most: int = MOST_DRAFT_TOKENS,
    budget: float = 120.0,
    progress: Callable[[float], None] | None = None,
    now: Now = time.perf_counter,
) -> TuneResult:
    """Find the drafter and number of draft tokens for these models, prompts and this machine.

    methods: candidates; None takes those of `llm`, suffix and ngram. Names with "+" between them are tried together under
        "auto", and each by itself. batch_sizes: prompts at a time; the advice is for all of them alike.
    workload: None takes the built-in prompts. params: for every request; None is greedy, 64 tokens. most: draft tokens.
    budget: seconds. Where it is too short for one group of questions under every candidate, the last candidates are left out
        and texts are shorter; `cut` of the result says so. now: the clock that it goes by.

    Raises ForedraftError before anything is measured for what cannot run, and RequestError for a request that fails.
    """
    started = now()
    params = settings_for(params, DEFAULT_TOKENS)
    check_settings(params, budget, None)
    if most < 1:
        raise ForedraftError(f"tuning needs at least 1 draft token to try, not {most}")
    sizes = _checked_sizes(batch_sizes)
    workload = workload or built_in_workload()
    check_fits(llm, workload, params)
    singles, joined = _candidates(llm, methods)
    show = progress or (lambda share: None)
    measurement = measure(
        llm,
        singles,
        sizes,
        workload,
        params,
        most=most,
        budget=_MEASURING * budget,
        progress=lambda share: show(_MEASURING * share),
        now=now,
    )
    wanted, params = params, measurement.params
    predictions = predict_all(measurement, most)
    left = _CHECKING * budget - (now() - started)
    result = run_bench(
        llm,
        [Configuration.plain(size) for size in sizes]
        + [Configuration(m, g, size) for size in sizes for m, g in _to_run(predictions, measurement, joined)],
        workload,
        params,
        budget=max(left, _LEAST),
        repeats=_MOST_PASSES,
        progress=lambda share: show(_MEASURING + (1.0 - _MEASURING) * share),
        least=len(sizes) + 1,
        now=now,
    )
    finalists = _finalists(result, predictions)
    return TuneResult(
        predictions=tuple(predictions),
        finalists=finalists,
        advice=choose(finalists),
        bench=result,
        num_groups={size: len({trial.group for trial in measurement.plain(size)}) for size in sizes},
        seconds=now() - started,
        budget=budget,
        cut=told(measurement.left_out, *[(one.max_tokens or 0, 0) for one in (wanted, params)]) + result.cut,
    )


def predict_all(measurement: Measurement, most: int) -> list[Prediction]:
    """Every drafter and γ from 1 to `most`, batch size by batch size, the fastest first."""
    found: list[Prediction] = []
    for size in measurement.batch_sizes:
        plain = PlainSpeed(measurement.plain(size))
        of_size: list[Prediction] = []
        for name, method in measurement.methods.items():
            predictor = Predictor(measurement.drafted(name, size))
            of_size += [predict(predictor, plain, Configuration(method, g, size)) for g in range(1, most + 1)]
        found += sorted(of_size, key=lambda one: -one.speedup.value)
    return found


def choose(finalists: Sequence[Finalist]) -> Advice:
    """The setting with the greatest expected speedup (the geometric mean over batch sizes), of those that pay at some batch size
    and whose interval lies below 1 at none. Where none pays, plain decoding: it then costs at most what WORTH says."""
    by_setting: dict[Setting, list[Finalist]] = {}
    for one in finalists:
        by_setting.setdefault(_setting(one.configuration), []).append(one)
    ranked = sorted(by_setting.values(), key=_mean_speedup, reverse=True)
    best = next((found for found in ranked if _pays(found)), None)
    if best is None:
        return Advice(Configuration.plain(), tuple(ranked[0]))
    return Advice(replace(best[0].configuration, batch_size=1), tuple(best))


def _pays(found: Sequence[Finalist]) -> bool:
    """One group of questions gives no interval, and decides nothing."""
    expected = [one.expected for one in found]
    is_worth = any(one.value >= WORTH and one.interval and one.interval.low >= RISK for one in expected)
    return is_worth and all(one.interval and one.interval.high >= 1.0 for one in expected)


def _mean_speedup(found: Sequence[Finalist]) -> float:
    return exp(fsum(log(one.expected.value) for one in found) / len(found))


def _setting(configuration: Configuration) -> Setting:
    assert configuration.speculative_tokens is not None
    return name_of(configuration.method or NO_DRAFT), configuration.speculative_tokens


def _checked_sizes(batch_sizes: Sequence[int]) -> list[int]:
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ForedraftError(f"batch sizes must be at least 1, not {list(batch_sizes)}")
    return sizes


def _candidates(llm: LLM, methods: Sequence[str | Drafter] | None) -> tuple[list[str | Drafter], list[str]]:
    """-> each drafter by itself, and the names that are to be tried together"""
    if methods is None:
        own = [name for name in llm.method.split("+") if name in REGISTRY and name != NO_DRAFT]
        return list(dict.fromkeys([*own, *_LOOKUPS])), []
    singles: dict[str, str | Drafter] = {}
    for method in methods:
        parts: list[str | Drafter] = [*method.split("+")] if isinstance(method, str) else [method]
        singles |= {name_of(part): part for part in parts}
    if NO_DRAFT in singles or not singles:
        raise ForedraftError('give at least one drafter to tune; plain decoding ("none") is always among what is run')
    return list(singles.values()), [method for method in methods if isinstance(method, str) and "+" in method]


def _to_run(
    predictions: Sequence[Prediction], measurement: Measurement, joined: Sequence[str]
) -> list[tuple[str | Drafter, int | str]]:
    """The same settings at every batch size: the few best fixed ones, and "auto" over the drafters that came near them."""
    scores: dict[Setting, float] = {}
    for one in predictions:
        key = _setting(one.configuration)
        scores[key] = scores.get(key, 0.0) + log(one.speedup.value) / len(measurement.batch_sizes)
    ranked = sorted(scores, key=lambda key: -scores[key])
    best_of = [next(p for p in predictions if p.configuration.batch_size == size) for size in measurement.batch_sizes]
    tops = [ranked[0], *(_setting(one.configuration) for one in best_of)]
    firsts = {name: key for key in reversed(ranked) for name in [key[0]]}  # each drafter's own best
    near = [
        firsts[name] for name in _by_score(firsts, scores) if scores[firsts[name]] >= scores[ranked[0]] + log(_NEAR)
    ]
    chosen = list(dict.fromkeys([*tops, *near, *ranked]))[: max(_NUM_FINALISTS, len(set(tops)))]
    fixed: list[tuple[str | Drafter, int | str]] = [(measurement.methods[name], gamma) for name, gamma in chosen]
    return fixed + [(method, AUTO) for method in _autos(near, measurement, joined)]


def _by_score(firsts: Mapping[str, Setting], scores: Mapping[Setting, float]) -> list[str]:
    return sorted(firsts, key=lambda name: -scores[firsts[name]])


def _autos(near: Sequence[Setting], measurement: Measurement, joined: Sequence[str]) -> list[str | Drafter]:
    """The best drafter alone, and those near it together; drafters that are objects have no name to join."""
    names = [name for name, _ in near if isinstance(measurement.methods[name], str)]
    together = ["+".join(names)] if len(names) > 1 else []
    return list(dict.fromkeys([measurement.methods[near[0][0]], *(joined or together)]))


def _finalists(result: BenchResult, predictions: Sequence[Prediction]) -> tuple[Finalist, ...]:
    """The fastest first within each batch size."""
    predicted = {one.configuration.name: one for one in predictions}
    found = [
        Finalist(
            configuration=one,
            predicted=predicted.get(one.name),
            measured=result.typical_speedup(one.name, Configuration.plain(one.batch_size).name),
            tokens_per_second=result.figures(one.name).tokens_per_second,
        )
        for one in result.configurations
        if not one.is_plain
    ]
    return tuple(sorted(found, key=lambda one: (one.configuration.batch_size, -one.expected.value)))
