"""Confines an exception to the item that caused it: invariant 9 of docs/architecture.md."""

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


def run_isolated(
    items: Sequence[T],
    run: Callable[[Sequence[T]], R],
    retry: Callable[[Sequence[T]], R],
    fail: Callable[[T, Exception], None],
) -> tuple[list[R], Exception | None]:
    """Call run(items). If it raises, call retry(part) on ever smaller halves, down to the single items that raise.

    One such item among N costs about 2 log2(N) more runs. retry: must be repeatable, for any part of the items. fail: takes
    the item that raised, and its error. -> the results in order, and the error of `run` if no single item raised
    """
    try:
        return [run(items)], None
    except Exception as error:
        if not items:
            raise
        first = error
    logger.warning("a step of %d sequences failed: %s; it is retried in parts", len(items), brief(first))
    results, num_failed, parts = list[R](), 0, [items]
    while parts:
        part = parts.pop()
        try:
            results.append(retry(part))
        except Exception as error:
            if len(part) == 1:
                num_failed += 1
                fail(part[0], error)
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
    return results, None if num_failed else first


class Shield:
    """Calls objects whose errors must not end a request. Logs the first error of each object."""

    def __init__(self) -> None:
        self._logged: set[int] = set()

    def call(self, owner: object, call: Callable[[], T], default: T) -> T:
        """call(), or `default` if it raises. owner: the object that is called."""
        try:
            return call()
        except Exception as error:
            self.log(owner, error)
            return default

    def log(self, owner: object, error: Exception) -> None:
        """Log an error of this object, unless one was logged before."""
        if id(owner) in self._logged:
            return
        self._logged.add(id(owner))
        logger.warning(
            "%s failed: %s; requests continue without it, and its later errors are not logged",
            type(owner).__name__,
            brief(error),
        )
        logger.debug("the error of %s", type(owner).__name__, exc_info=error)


def brief(error: Exception) -> str:
    """An error for a log. Messages of other libraries' errors may contain a prompt, so only their type and location are shown."""
    if isinstance(error, ForedraftError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
