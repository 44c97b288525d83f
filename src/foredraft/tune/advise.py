"""Tuning: measures, predicts, runs the settings with the best predictions against plain decoding, and advises."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import exp, fsum, log, sqrt

from foredraft.bench import BenchResult, Configuration, Interval, Ratio, Workload, built_in_workload, run_bench
from foredraft.bench.budget import Now, describe_cuts
from foredraft.bench.runner import check_fits, check_settings
from foredraft.drafters import REGISTRY
from foredraft.engine.methods import LOOKUPS, NO_DRAFT, name_of
from foredraft.engine.proposal import Drafter
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.tune.finalists import Setting, configurations_to_run, setting_of
from foredraft.tune.measure import Measurement, measure, settings_for
from foredraft.tune.predict import PlainSpeed, Prediction, Predictor, predict

DEFAULT_TOKENS = 64
MOST_DRAFT_TOKENS = 8
_MEASURING, _CHECKING = 0.5, 0.92
"""Shares of the budget: for the runs that predictions are based on, and for these and the finalists' runs together."""
WORTH, RISK = 1.03, 0.95
"""The least expected speedup of a setting that is advised, and the least lower bound of its interval. The bound is below 1 because
prompts differ, so an interval over a few dozen of them is often wider than the gain."""
_LEAST_SECONDS = 1e-3
"""For running the finalists when the budget is spent: each still runs once."""
_MOST_PASSES = 12


@dataclass(frozen=True, slots=True)
class Finalist:
    """A setting that was run. predicted: None for "auto", which decides while it runs. measured: the speedup over plain decoding
    with the same batch size and questions."""

    configuration: Configuration
    predicted: Prediction | None
    measured: Ratio
    tokens_per_second: float

    @property
    def expected(self) -> Ratio:
        """The geometric mean of prediction and measurement, and of their bounds: both are based on the same prompts."""
        if self.predicted is None:
            return self.measured
        ours, theirs = self.measured, self.predicted.speedup
        if ours.interval is None or theirs.interval is None:
            return Ratio(sqrt(ours.value * theirs.value), None)
        bounds = zip(astuple(ours.interval), astuple(theirs.interval), strict=True)
        return Ratio(sqrt(ours.value * theirs.value), Interval(*(sqrt(max(a * b, 0.0)) for a, b in bounds)))


@dataclass(frozen=True, slots=True)
class Advice:
    """configuration: what to use, at any batch size. of: the measurements it is based on, one for each batch size: those of the
    advised setting, or of the best one if none was good enough. is_plain: whether the advice is not to speculate."""

    configuration: Configuration
    of: tuple[Finalist, ...]

    @property
    def is_plain(self) -> bool:
        return self.configuration.is_plain


@dataclass(frozen=True, slots=True)
class TuneResult:
    """predictions: for every drafter, γ and batch size, the best first within each batch size. bench: of the finalists.
    num_groups: by batch size, the number of groups of questions that the predictions are based on. seconds: for everything.
    cut: what the budget had no room for, one line each.
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
    """Find the best drafter and number of draft tokens for these models and prompts and this machine.

    methods: candidates; None uses those of `llm`, suffix and ngram. Names joined by "+" are tried together under "auto",
        and each by itself. batch_sizes: prompts at a time; one advice is given for all of them.
    workload: None uses the built-in prompts. params: for every request; None is greedy, 64 tokens. most: the most draft tokens.
    budget: seconds. If it is too short for one group of questions under every candidate, the last candidates are left out
        and texts are shortened; `cut` of the result says so. now: the clock of the budget.

    Raises ForedraftError, before anything is measured, for settings that cannot run, and RequestError if a request fails.
    """
    started = now()
    requested = settings_for(params, DEFAULT_TOKENS)
    check_settings(requested, budget, None)
    if most < 1:
        raise ForedraftError(f"tuning needs at least 1 draft token to try, not {most}")
    sizes = _checked_sizes(batch_sizes)
    workload = workload or built_in_workload(of_sources=llm.target.has_encoder)
    check_fits(llm, workload, requested)
    drafters, joined = _candidates(llm, methods)
    show = progress or (lambda share: None)
    measurement = measure(
        llm,
        drafters,
        sizes,
        workload,
        requested,
        most=most,
        budget=_MEASURING * budget,
        progress=lambda share: show(_MEASURING * share),
        now=now,
    )
    predictions = predict_all(measurement, most)
    bench = run_bench(
        llm,
        configurations_to_run(predictions, measurement, joined),
        workload,
        measurement.params,
        budget=max(_CHECKING * budget - (now() - started), _LEAST_SECONDS),
        repeats=_MOST_PASSES,
        progress=lambda share: show(_MEASURING + (1.0 - _MEASURING) * share),
        least=len(sizes) + 1,
        now=now,
    )
    return _result(predictions, measurement, bench, requested, seconds=now() - started, budget=budget)


def _result(
    predictions: Sequence[Prediction],
    measurement: Measurement,
    bench: BenchResult,
    requested: SamplingParams,
    *,
    seconds: float,
    budget: float,
) -> TuneResult:
    """requested: the parameters before texts were shortened."""
    finalists = _finalists(bench, predictions)
    tokens = [(params.max_tokens or 0, 0) for params in (requested, measurement.params)]
    return TuneResult(
        predictions=tuple(predictions),
        finalists=finalists,
        advice=choose(finalists),
        bench=bench,
        num_groups={size: len({trial.group for trial in measurement.plain(size)}) for size in measurement.batch_sizes},
        seconds=seconds,
        budget=budget,
        cut=describe_cuts(measurement.left_out, *tokens) + bench.cut,
    )


def predict_all(measurement: Measurement, most: int) -> list[Prediction]:
    """Predictions for every drafter and γ from 1 to `most`, by batch size, the fastest first within each."""
    predictions: list[Prediction] = []
    for size in measurement.batch_sizes:
        plain = PlainSpeed(measurement.plain(size))
        of_size: list[Prediction] = []
        for name, method in measurement.methods.items():
            predictor = Predictor(measurement.drafted(name, size))
            of_size += [predict(predictor, plain, Configuration(method, g, size)) for g in range(1, most + 1)]
        predictions += sorted(of_size, key=lambda one: -one.speedup.value)
    return predictions


def choose(finalists: Sequence[Finalist]) -> Advice:
    """The setting with the greatest expected speedup (the geometric mean over batch sizes), among those that pay at one or more
    batch sizes and are not slower than plain decoding at any. Plain decoding if no setting pays."""
    by_setting: dict[Setting, list[Finalist]] = {}
    for finalist in finalists:
        by_setting.setdefault(setting_of(finalist.configuration), []).append(finalist)
    ranked = sorted(by_setting.values(), key=_mean_speedup, reverse=True)
    best = next((finalists for finalists in ranked if _pays(finalists)), None)
    if best is None:
        return Advice(Configuration.plain(), tuple(ranked[0]))
    return Advice(replace(best[0].configuration, batch_size=1), tuple(best))


def _pays(finalists: Sequence[Finalist]) -> bool:
    """finalists: one setting's, by batch size. A single group of questions gives no interval, so it cannot show that a setting pays."""
    expected = [finalist.expected for finalist in finalists]
    is_worth = any(ratio.value >= WORTH and ratio.interval and ratio.interval.low >= RISK for ratio in expected)
    return is_worth and all(ratio.interval and ratio.interval.high >= 1.0 for ratio in expected)


def _mean_speedup(finalists: Sequence[Finalist]) -> float:
    return exp(fsum(log(finalist.expected.value) for finalist in finalists) / len(finalists))


def _checked_sizes(batch_sizes: Sequence[int]) -> list[int]:
    sizes = sorted(set(batch_sizes))
    if not sizes or sizes[0] < 1:
        raise ForedraftError(f"batch sizes must be at least 1, not {list(batch_sizes)}")
    return sizes


def _candidates(llm: LLM, methods: Sequence[str | Drafter] | None) -> tuple[list[str | Drafter], list[str]]:
    """-> each drafter, and the joined names to try together"""
    if methods is None:
        of_llm = [name for name in llm.method.split("+") if name in REGISTRY and name != NO_DRAFT]
        return list(dict.fromkeys([*of_llm, *LOOKUPS])), []
    singles: dict[str, str | Drafter] = {}
    for method in methods:
        parts: list[str | Drafter] = [*method.split("+")] if isinstance(method, str) else [method]
        singles |= {name_of(part): part for part in parts}
    if NO_DRAFT in singles or not singles:
        raise ForedraftError('give at least one drafter to tune; plain decoding ("none") is always run')
    return list(singles.values()), [method for method in methods if isinstance(method, str) and "+" in method]


def _finalists(result: BenchResult, predictions: Sequence[Prediction]) -> tuple[Finalist, ...]:
    """The finalists, the fastest first within each batch size."""
    predicted = {prediction.configuration.name: prediction for prediction in predictions}
    finalists = [
        Finalist(
            configuration=configuration,
            predicted=predicted.get(configuration.name),
            measured=result.typical_speedup(configuration.name, Configuration.plain(configuration.batch_size).name),
            tokens_per_second=result.figures(configuration.name).tokens_per_second,
        )
        for configuration in result.configurations
        if not configuration.is_plain
    ]
    return tuple(sorted(finalists, key=lambda one: (one.configuration.batch_size, -one.expected.value)))
