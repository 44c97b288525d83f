"""What a command's process does differently until it is ready: it imports thousands of modules, and nothing else yet."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType

_INTERRUPTED = 130
_SPINS = 30_000
"""How often a thread of OpenMP looks for work before it sleeps. Its own default, 300,000, keeps a core busy for
milliseconds after every product while a command starts. With 1,000 the embedded target wrote 12 to 16 % fewer tokens a
second, because threads slept between passes; with 30,000 as many as by default."""


def begin() -> None:
    """To be called before anything is imported that computes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    gc.disable()  # what modules are made of stays: to look through it for garbage again and again costs half a second
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))


def ready() -> None:
    """Everything is imported: Ctrl-C is an exception again, and garbage is collected."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _leave(_number: int, _frame: FrameType | None) -> None:
    """At once: an exception in the middle of an import may be swallowed there, or shown, and nothing needs tidying up."""
    os._exit(_INTERRUPTED)
