"""Runs that a signal interrupts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def stopping_after(num_steps: int) -> Any:
    """Replaces stop_on_signal: as if a signal came after num_steps steps."""

    @contextmanager
    def stop() -> Iterator[Any]:
        count = iter(range(1000))
        yield lambda: next(count) >= num_steps

    return stop
