"""The device that is measured, and its clock: a GPU if there is one, otherwise the CPU, to check that the scripts run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32  # Triton's interpreter has no bfloat16 products


def median_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of a run from an idle device to an idle device, work on the host included. Two runs before are not counted."""
    times = []
    for _ in range(repeats + 2):
        wait()
        started = time.perf_counter()
        run()
        wait()
        times.append(1000 * (time.perf_counter() - started))
    return float(torch.tensor(times[2:]).median())


def wait() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()
