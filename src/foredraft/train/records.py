"""What a run logs: a record of each step, and of each validation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the log. loss, acceptance, agreement: means over tokens. norm: of the gradient, before clipping.
    progress: of the run, 0 to 1. seconds: of training so far."""

    step: int
    loss: float
    acceptance: float
    agreement: float
    num_tokens: int
    norm: float
    progress: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """loss, acceptance: on held-out text, by its kind."""

    step: int
    loss: dict[str, float]
    acceptance: dict[str, float]


def read_log(file: Path) -> list[dict[str, Any]]:
    """The records of a log, without an incomplete last line that a kill left."""
    records: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
