"""Ctrl-C takes effect at the end of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest

from foredraft.utils.interrupts import DeferredInterrupt


def fail() -> None:
    raise ValueError("injected")


def deferred(*actions: Callable[[], object]) -> None:
    with DeferredInterrupt():
        for action in actions:
            action()


def test_ctrl_c_takes_effect_at_the_end_of_the_block(ctrl_c: Callable[[], None]) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        deferred(ctrl_c, lambda: done.append("all of it"))
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_takes_effect_at_once(ctrl_c: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt):
        deferred(ctrl_c, ctrl_c, lambda: pytest.fail("the second one was deferred too"))


def test_the_outermost_block_decides(ctrl_c: Callable[[], None]) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        deferred(lambda: deferred(ctrl_c), lambda: done.append("after the inner block"))
    assert done == ["after the inner block"]


def test_an_error_in_the_block_is_the_context_of_the_interrupt(ctrl_c: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        deferred(ctrl_c, fail)
    assert isinstance(caught.value.__context__, ValueError)


def test_without_ctrl_c_errors_pass() -> None:
    with pytest.raises(ValueError, match="injected"):
        deferred(fail)


def test_the_callers_handler_is_called(ctrl_c: Callable[[], None]) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    try:
        with DeferredInterrupt():
            ctrl_c()
            assert calls == []
        assert calls == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with DeferredInterrupt():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_other_threads_leave_handlers_alone() -> None:
    handlers: list[object] = []

    def run() -> None:
        with DeferredInterrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
