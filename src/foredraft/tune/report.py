"""The result of tuning as a table, sentences, JSON, and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from foredraft.bench import Configuration, Ratio
from foredraft.bench.report import SAMPLING_FIELDS
from foredraft.engine.methods import name_of
from foredraft.errors import ForedraftError
from foredraft.settings import Settings
from foredraft.tune.advise import Finalist, TuneResult
from foredraft.tune.predict import Prediction

SCHEMA = "foredraft.tune"
VERSION = 1
COLUMNS = ("batch size", "method", "γ", "predicted speedup", "measured speedup", "tokens/s")
_NUM_SHOWN = 3


def table_rows(result: TuneResult, *, num_shown: int = _NUM_SHOWN) -> list[list[str]]:
    """Rows under COLUMNS: for each batch size the settings that were run, the fastest first, then the best predictions."""
    rows: list[list[str]] = []
    for size in result.num_groups:
        run = [one for one in result.finalists if one.configuration.batch_size == size]
        names = {one.configuration.name for one in run}
        rows += [_row(o.configuration, o.predicted, o.measured, o.tokens_per_second) for o in run]
        others = [p for p in result.predictions if p.configuration.batch_size == size]
        others = [p for p in others if p.configuration.name not in names][:num_shown]
        rows += [_row(p.configuration, p, None, p.tokens_per_second) for p in others]
    return rows


def _row(configuration: Configuration, predicted: Prediction | None, measured: Ratio | None, rate: float) -> list[str]:
    return [
        str(configuration.batch_size),
        name_of(configuration.method or ""),
        str(configuration.speculative_tokens),
        ratio_text(predicted.speedup) if predicted else "",
        ratio_text(measured) if measured else "",
        f"{rate:.1f}",
    ]


def ratio_text(ratio: Ratio) -> str:
    inner = "" if ratio.interval is None else f" ({ratio.interval.low:.2f} to {ratio.interval.high:.2f})"
    return f"{ratio.value:.2f}{inner}"


def sentences(result: TuneResult) -> list[str]:
    """The advice, then its context."""
    advice, of = result.advice, result.advice.of
    best = name_of(of[0].configuration.method or ""), of[0].configuration.speculative_tokens
    named = f"{best[0]} with {_tokens(best[1])}"
    if not advice.is_plain:
        lines = [f"Use {named}: expect {_speedups(of)}."]
        if any(one.expected.interval is not None and one.expected.interval.low < 1.0 for one in of):
            lines.append(
                "The interval reaches below 1: on other prompts of these kinds it may be no faster, or even slower."
            )
    elif all(one.expected.interval for one in of):
        lines = [
            f"Do not speculate: the best setting, {named}, reaches {_speedups(of)}, which is too little or too uncertain."
        ]
    else:
        lines = [f"Do not speculate: {named} reached {_speedups(of)}, but on too few prompts to tell."]
    groups = ", ".join(_counted(num, size) for size, num in result.num_groups.items())
    lines.append(
        f"Predictions are based on {groups} ({result.bench.workload.name}), {result.bench.params.max_tokens} tokens each; "
        f"intervals are 95 % over prompts; tuning took {result.seconds:.0f} s."
    )
    if result.cut:
        lines.append(f"Cut by the budget of {result.budget:.0f} s: {'; '.join(result.cut)}.")
    return lines


def _counted(num_groups: int, size: int) -> str:
    """ "3 prompts", or "1 group of 8". size: prompts in a group."""
    noun = f"{'prompt' if size == 1 else 'group'}{'' if num_groups == 1 else 's'}"
    return f"{num_groups} {noun}" if size == 1 else f"{num_groups} {noun} of {size}"


def _tokens(speculative_tokens: int | str | None) -> str:
    if isinstance(speculative_tokens, int):
        return f"{speculative_tokens} draft token{'s' if speculative_tokens > 1 else ''}"
    return f'speculative_tokens "{speculative_tokens}"'


def _speedups(of: Sequence[Finalist]) -> str:
    if len(of) == 1:
        return f"a speedup of {ratio_text(of[0].expected)} over plain decoding"
    speedups = (f"{ratio_text(one.expected)} at batch size {one.configuration.batch_size}" for one in of)
    return f"a speedup over plain decoding of {', '.join(speedups)}"


def as_dict(result: TuneResult) -> dict[str, Any]:
    """The object that --json prints, as described in docs/guides/tuning.md."""
    params = result.bench.params
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "environment": asdict(result.bench.environment),
        "settings": {
            "sampling": {name: getattr(params, name) for name in SAMPLING_FIELDS},
            "workload": result.bench.workload.name,
            "num_questions": len(result.bench.workload.questions),
            "num_groups": {str(size): num for size, num in result.num_groups.items()},
            "budget": result.budget,
            "cut": list(result.cut),
            "seconds": result.seconds,
        },
        "advice": {
            "speculate": not result.advice.is_plain,
            **_named(result.advice.configuration),
            "of": [_finalist(one) for one in result.advice.of],
            "text": sentences(result)[0],
        },
        "measured": [_finalist(one) for one in result.finalists],
        "predicted": [_prediction(one) for one in result.predictions],
    }


def _named(configuration: Configuration) -> dict[str, Any]:
    return {"method": name_of(configuration.method or ""), "speculative_tokens": configuration.speculative_tokens}


def _finalist(one: Finalist) -> dict[str, Any]:
    return {
        **_named(one.configuration),
        "batch_size": one.configuration.batch_size,
        "expected_speedup": asdict(one.expected),
        "measured_speedup": asdict(one.measured),
        "tokens_per_second": one.tokens_per_second,
        "predicted_speedup": None if one.predicted is None else asdict(one.predicted.speedup),
    }


def _prediction(one: Prediction) -> dict[str, Any]:
    return {
        **_named(one.configuration),
        "batch_size": one.configuration.batch_size,
        "speedup": asdict(one.speedup),
        "tokens_per_second": one.tokens_per_second,
    }


def as_settings(result: TuneResult, **models: Any) -> tuple[Settings, dict[str, Any]]:
    """-> the advice as settings, and the measurements it is based on, for the file's table. models: the other fields of Settings.

    Raises ForedraftError for a drafter that is an object, because a file can only name a drafter.
    """
    configuration, environment = result.advice.configuration, result.bench.environment
    if not isinstance(configuration.method, str):
        raise ForedraftError(
            f"{name_of(configuration.method or '')} is an object, but a settings file can only name a drafter"
        )
    settings = Settings(method=configuration.method, speculative_tokens=configuration.speculative_tokens, **models)
    measured = {
        "date": environment.date,
        "foredraft": environment.foredraft,
        "processor": environment.machine.processor,
        "gpus": environment.machine.gpus,
        "num_threads": environment.machine.num_threads,
        "target": environment.target.name,
        "draft": next((each.name for each in (environment.draft, environment.head) if each is not None), None),
        "workload": result.bench.workload.name,
        "temperature": result.bench.params.temperature,
        "max_tokens": result.bench.params.max_tokens,
        "advice": sentences(result)[0],
        "expected": [
            {
                "batch_size": one.configuration.batch_size,
                "speedup": round(one.expected.value, 3),
                "interval": None
                if (interval := one.expected.interval) is None
                else [round(interval.low, 3), round(interval.high, 3)],
            }
            for one in ([] if result.advice.is_plain else result.advice.of)
        ],
    }
    return settings, measured
