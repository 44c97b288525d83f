"""Compares configurations on the user's models, prompts and machine: paired, interleaved, with intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.bench.built_in import built_in_workload
    from foredraft.bench.configurations import Configuration
    from foredraft.bench.figures import Figures
    from foredraft.bench.records import Answer, GroupRun, Turn
    from foredraft.bench.result import BenchResult, Comparison, Difference, Identity
    from foredraft.bench.runner import run_bench
    from foredraft.bench.statistics import Interval, Percentiles, Ratio
    from foredraft.bench.workload import Question, Workload

__all__ = [
    "Answer",
    "BenchResult",
    "Comparison",
    "Configuration",
    "Difference",
    "Figures",
    "GroupRun",
    "Identity",
    "Interval",
    "Percentiles",
    "Question",
    "Ratio",
    "Turn",
    "Workload",
    "built_in_workload",
    "run_bench",
]

__getattr__ = attributes(
    __name__,
    {
        "built_in": ("built_in_workload",),
        "configurations": ("Configuration",),
        "figures": ("Figures",),
        "records": ("Answer", "GroupRun", "Turn"),
        "result": ("BenchResult", "Comparison", "Difference", "Identity"),
        "runner": ("run_bench",),
        "statistics": ("Interval", "Percentiles", "Ratio"),
        "workload": ("Question", "Workload"),
    },
)
