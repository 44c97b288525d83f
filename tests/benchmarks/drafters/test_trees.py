"""With several methods, the merged tree is compared with the method that was fastest alone."""

from __future__ import annotations

import pytest

from benchmarks.drafters.embedded_pair_speed import System
from benchmarks.drafters.trees import over_parts
from foredraft.engine.stats import SpeculationStats


def system(name: str, *seconds: float) -> System:
    found = System(name, lambda prompt, max_tokens: ([], SpeculationStats()))
    found.seconds.extend(seconds)
    return found


def test_the_merged_tree_is_compared_with_the_faster_part() -> None:
    systems = [system("plain", 9, 9), system("auto", 2, 2), system("auto, only a", 3, 5), system("auto, only b", 3, 3)]
    (row,) = over_parts(systems, 128)
    assert row["system"] == "auto, over the better (b)"
    assert row["ratio"] == pytest.approx(1.5)


def test_one_method_has_no_parts() -> None:
    assert over_parts([system("plain", 9), system("auto", 2)], 128) == []
