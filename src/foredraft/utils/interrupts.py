"""Ctrl-C between two changes of state, never in the middle of one."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the functions of `signal` look handlers up in an enum, which takes ten times as long
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_MAIN = threading.main_thread().ident


class DeferredInterrupt:
    """A block that Ctrl-C does not cut short: it takes effect at the end. A second Ctrl-C takes effect at once, in case the block hangs.
    Does nothing outside the main thread, since no other is interrupted, and where Ctrl-C has no handler in Python."""

    __slots__ = ("_handler", "_is_pending")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._is_pending = False

    def __enter__(self) -> None:
        if threading.get_ident() == _MAIN and callable(handler := _signal.getsignal(_signal.SIGINT)):
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._defer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        _signal.signal(_signal.SIGINT, self._handler)
        if self._is_pending and kind is not KeyboardInterrupt:
            self._handler(_signal.SIGINT, None)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
