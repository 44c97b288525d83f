"""The result of `foredraft train evaluate`, as JSON and as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foredraft.cli.render.console import output_console, write_lines
from foredraft.cli.render.measurement import table_of
from foredraft.cli.render.units import number_text

if TYPE_CHECKING:
    from foredraft.bench import Interval
    from foredraft.train import Expectation, KindReport, SpeedPrediction

_HEAD = (
    "text",
    "texts",
    "temperature",
    "Σmin(p, q)",
    "γ",
    "acceptance by position",
    "τ",
    "τ measured",
    "predicted speedup",
)


def evaluation_as_dict(reports: Sequence[KindReport], speeds: Sequence[SpeedPrediction]) -> dict[str, Any]:
    speed_of = {speed.gamma: speed for speed in speeds}
    return {
        "schema": "foredraft.train.evaluation",
        "version": 1,
        "kinds": [
            {
                "kind": report.kind,
                "temperature": report.temperature,
                "num_texts": report.texts.num_measured,
                "num_texts_asked": report.texts.num_asked,
                "num_documents": report.texts.num_documents,
                "num_documents_too_short": report.texts.num_too_short,
                "acceptance_on_text": report.on_text.mean,
                "of": [
                    _expectation_as_dict(report, gamma, expected, speed_of.get(gamma))
                    for gamma, expected in report.expected.items()
                ],
            }
            for report in reports
        ],
    }


def _expectation_as_dict(
    report: KindReport, gamma: int, expected: Expectation, speed: SpeedPrediction | None
) -> dict[str, Any]:
    interval = report.tau_intervals[gamma]
    return {
        "speculative_tokens": gamma,
        "tau": expected.tau,
        "tau_interval": None if interval is None else asdict(interval),
        "acceptance_by_position": _by_position(expected),
        "measured_tau": report.measured.get(gamma),
        "predicted_speedup": None if speed is None else speed.speedup(expected.tau),
    }


def print_evaluation(reports: Sequence[KindReport], speeds: Sequence[SpeedPrediction]) -> None:
    speed_of = {speed.gamma: speed for speed in speeds}
    rows = [
        _row(report, gamma, expected, speed_of.get(gamma))
        for report in reports
        for gamma, expected in report.expected.items()
    ]
    console = output_console()
    console.print(table_of(_HEAD, rows, left=("text", "acceptance by position")))
    write_lines(console, _missing_texts(reports))


def _row(report: KindReport, gamma: int, expected: Expectation, speed: SpeedPrediction | None) -> list[str]:
    return [
        report.kind,
        str(report.texts.num_measured),
        f"{report.temperature:g}",
        f"{report.on_text.mean:.3f}",
        str(gamma),
        " ".join(number_text(alpha) for alpha in _by_position(expected)),
        _with_interval(expected.tau, report.tau_intervals[gamma]),
        f"{report.measured[gamma]:.2f}" if gamma in report.measured else "",
        "" if speed is None else f"{speed.speedup(expected.tau):.2f}",
    ]


def _by_position(expected: Expectation) -> list[float | None]:
    """None where no draft got that far."""
    return [None if math.isnan(alpha) else alpha for alpha in expected.by_position]


def _with_interval(value: float, interval: Interval | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _missing_texts(reports: Sequence[KindReport]) -> list[str]:
    """For each kind with fewer texts than were requested: why, and what an interval would need."""
    short = {report.kind: report.texts for report in reports if report.texts.shortfall is not None}
    lines = [f"{kind}: {texts.shortfall}" for kind, texts in short.items()]
    if short:
        lines.append(
            "Each document gives one text: see --separator, --separator-line and --text-field for where one ends."
        )
    if any(texts.num_measured < 2 for texts in short.values()):
        lines.append("One text gives no interval: the result on another text may be quite different.")
    return lines
