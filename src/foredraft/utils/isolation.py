"""Confine an exception to the item that caused it: invariant 9 of docs/architecture.md."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from foredraft.errors import ForedraftError

logger = logging.getLogger("foredraft")

T = TypeVar("T")
R = TypeVar("R")


def together_or_apart(
    items: Sequence[T],
    together: Callable[[Sequence[T]], R],
    apart: Callable[[Sequence[T]], R],
    fail: Callable[[T, Exception], None],
) -> tuple[list[R], Exception | None]:
    """together(items). If that raises, apart(part) for smaller and smaller parts, down to each item that raises alone.

    apart: the simpler variant; may be called again, for any part of the items. fail: receives an item that raised, and its
    error. -> the results, and the error of `together` if no single item raised
    """
    try:
        return [together(items)], None
    except Exception as error:
        if not items:
            raise
        first = error
    logger.warning("a step of %d sequences failed: %s; it is repeated in parts", len(items), brief(first))
    num_failed = 0

    def failed(item: T, error: Exception) -> None:
        nonlocal num_failed
        num_failed += 1
        fail(item, error)

    results = in_halves(items, apart, failed)
    return results, None if num_failed else first


def in_halves(items: Sequence[T], run: Callable[[Sequence[T]], R], fail: Callable[[T, Exception], None]) -> list[R]:
    """run(items). If that raises, the same for each half, down to each item that raises alone, which fails.

    One such item among N costs about 2 log2(N) more runs. run: may be called again, for any part of the items.
    """
    try:
        return [run(items)]
    except Exception as error:
        if len(items) == 1:
            fail(items[0], error)
            return []
    middle = len(items) // 2
    return [*in_halves(items[:middle], run, fail), *in_halves(items[middle:], run, fail)]


class Shield:
    """Calls objects whose errors must not end a request. Logs the first error of each object."""

    def __init__(self) -> None:
        self._logged: set[int] = set()

    def call(self, owner: object, call: Callable[[], T], default: T) -> T:
        """call(), or `default` if it raises. owner: the object that is called."""
        try:
            return call()
        except Exception as error:
            if id(owner) not in self._logged:
                self._logged.add(id(owner))
                logger.warning(
                    "%s failed: %s; requests go on without it, and its later errors are not logged",
                    type(owner).__name__,
                    brief(error),
                )
                logger.debug("the error of %s", type(owner).__name__, exc_info=error)
            return default


def brief(error: Exception) -> str:
    """An error for a log. Messages of foreign errors may contain a prompt, so only their type and place are shown."""
    if isinstance(error, ForedraftError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
