"""Stopping a run between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM was received. A second one raises KeyboardInterrupt.

    Outside the main thread, where signals cannot be handled, it always returns False.
    """
    is_stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        if is_stopping:
            raise KeyboardInterrupt
        is_stopping = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: is_stopping
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
