"""Results computed from simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.bench import Answer, BenchResult, Configuration, GroupRun, Turn, Workload
from foredraft.engine.stats import SpeculationStats

CONFIGURATIONS = (Configuration.plain(), Configuration("suffix", 4))


def a_run(name: str, group: int, repeat: int, seconds: float, num_tokens: int = 10) -> GroupRun:
    turn = Turn(1, tuple(range(num_tokens)), "length", seconds, seconds / 2, (seconds / 2,), SpeculationStats())
    answer = Answer(str(group), "prompts", (turn,))
    return GroupRun(name, group, repeat, "prompts", seconds, (answer,))


def result_of(plain: Sequence[Sequence[float]], drafted: Sequence[Sequence[float]]) -> BenchResult:
    """A result with these times, in seconds by group and repeat."""
    environment: Any = None
    runs = [
        a_run(configuration.name, group, repeat, seconds)
        for configuration, table in zip(CONFIGURATIONS, (plain, drafted), strict=True)
        for group, repeats in enumerate(table)
        for repeat, seconds in enumerate(repeats)
    ]
    workload = Workload.of([str(group) for group in range(len(plain))])
    return BenchResult(CONFIGURATIONS, workload, SamplingParams(), False, True, environment, tuple(runs))


def test_without_repeats_the_typical_speedup_equals_the_speedup() -> None:
    result = result_of([[1.0], [2.0], [4.0]], [[0.5], [2.0], [1.0]])
    found = result.typical_speedup("suffix:4", "plain")
    assert found.value == pytest.approx(result.compare("suffix:4").speedup.value) == 2.0
    assert found.interval == result.compare("suffix:4").speedup.interval


def test_single_disturbances_of_the_machine_do_not_count() -> None:
    """Neither a repeat in which everything was slow, nor one slow run of one configuration."""
    quiet = result_of([[1.0] * 3, [2.0] * 3], [[0.5] * 3, [1.0] * 3])
    noisy = result_of([[1.0, 9.0, 1.0], [2.0, 2.0, 2.0]], [[0.5, 4.5, 0.5], [1.0, 1.0, 50.0]])
    expected = quiet.typical_speedup("suffix:4", "plain")
    assert expected.value == pytest.approx(2.0)
    assert noisy.typical_speedup("suffix:4", "plain") == expected
