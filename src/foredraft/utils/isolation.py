"""Whose fault an exception is, and who goes on without it: invariant 9 of docs/architecture.md."""

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
    """together(items); where that raises, apart(part) for smaller and smaller parts, down to the item that raises alone.

    apart: the plainer way; may be repeated, for any part of the items. fail: takes the item that raised, and its error.
    -> the results, and what `together` raised if no item did alone
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
    """Run for all together; where that raises, for each half, down to the item that raises alone, which fails.

    One such item among N costs about 2 log2(N) more runs. run: may be repeated, for any part of the items.
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
    """Calls to those whose errors must not end a request. The first error of each of them is logged."""

    def __init__(self) -> None:
        self._logged: set[int] = set()

    def call(self, owner: object, call: Callable[[], T], default: T) -> T:
        """call(), or `default` if it raises. owner: whose call it is."""
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
    """An error as a log may show it. What others' errors say may hold a prompt, so only their kind and place are told."""
    if isinstance(error, ForedraftError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
