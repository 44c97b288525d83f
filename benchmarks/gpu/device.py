"""The device that is measured, and its clock: a GPU where there is one, else the CPU, to see that the scripts run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32  # Triton's interpreter knows no products of bfloat16


def median_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """From an idle device to an idle one, after two runs that are not counted: what the host does is in it."""
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
