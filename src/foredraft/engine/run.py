"""The loop in which all callers of an engine run their requests to the end: submit, step, abort."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from foredraft.engine.engine import Engine
from foredraft.utils.interrupts import DeferredInterrupt


class Finishable(Protocol):
    """One sequence, or several that end together."""

    @property
    def is_finished(self) -> bool: ...


T = TypeVar("T", bound=Finishable)


def run_steps(
    engine: Engine,
    items: Sequence[T],
    *,
    submit: Callable[[T], object],
    abort: Callable[[T], object],
    timer: AbstractContextManager[object] | None = None,
) -> Generator[None, None, None]:
    """Submit all items and step the engine until all of them are finished. Yields after each step.

    However the loop ends (an error, Ctrl-C, the caller closing the generator), every item is aborted, so that nothing is left in the
    engine. abort: must do nothing for an item that has finished or was never submitted.
    timer: entered once for all submissions and once for each step, so it does not count the caller's work; it must be reusable.
    """
    timer = timer or nullcontext()
    try:
        with timer:
            for item in items:
                submit(item)
        while not all(item.is_finished for item in items):
            with timer:
                engine.step()
            yield
    finally:
        with DeferredInterrupt():
            for item in items:
                abort(item)
