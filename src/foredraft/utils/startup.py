"""Process settings for the start of a command, which imports thousands of modules."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType

_INTERRUPTED = 130
_SPINS = 30_000
"""How often an OpenMP thread looks for work before it sleeps. OpenMP's default, 300,000, keeps a core busy for
milliseconds after every product while a command starts. With 1,000 the embedded target generated 12 to 16 % fewer tokens per
second, since threads slept between passes; 30,000 costs nothing."""


def begin() -> None:
    """Call this before importing PyTorch."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    gc.disable()  # imported modules are not garbage; scanning them for garbage costs half a second
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def ready() -> None:
    """Call this when everything is imported: Ctrl-C raises KeyboardInterrupt again, and garbage is collected."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """Exit at once: an exception in the middle of an import may be swallowed or printed, and there is nothing to clean up."""
    os._exit(_INTERRUPTED)
