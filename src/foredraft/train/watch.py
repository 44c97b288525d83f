"""Callbacks for the progress of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foredraft.train.peak_memory import MemoryForecast
from foredraft.train.records import StepRecord


@dataclass(frozen=True, slots=True)
class Watch:
    """prepare: called with the name of each stage in which input is read and checked, as it begins. stage: the same for the stages
    after these. share: with the finished share of a stage. memory: with the memory that training will take, before the first step.
    step: after each step."""

    prepare: Callable[[str], None] = lambda _: None
    stage: Callable[[str], None] = lambda _: None
    share: Callable[[float], None] = lambda _: None
    memory: Callable[[MemoryForecast], None] = lambda _: None
    step: Callable[[StepRecord], None] = lambda _: None


UNWATCHED = Watch()
