"""A queue that is fair among clients, and fair shares of a budget. Neither uses a clock or a model.

The queue uses virtual token counters (arXiv:2401.00588): the client that was served least is next, and an idle client gains
no credit. The items of one client are ordered by priority, then by arrival.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar


class Item(Protocol):
    """An item of a client. priority: orders the items of one client; the lower, the earlier."""

    @property
    def client(self) -> str: ...

    @property
    def priority(self) -> int: ...


T = TypeVar("T", bound=Item)


def _priority(item: Item) -> int:
    return item.priority


class FairQueue(Generic[T]):
    """Waiting items. Iterating yields them client by client, starting with the client that is next."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[T]] = {}
        self._num_started: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        self._clock = 0
        """The most that a client had been served when one of its items started."""

    def __iter__(self) -> Iterator[T]:
        for client in sorted(self._waiting, key=self._rank):
            yield from self._waiting[client]

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, item: T) -> bool:
        return item in self._waiting.get(item.client, ())

    def append(self, item: T) -> None:
        """Queue a new item."""
        insort_right(self._queue_of(item.client), item, key=_priority)

    def put_back(self, item: T) -> None:
        """Queue a started item again, before all others of the same client and priority."""
        self._num_started[item.client] -= 1
        insort_left(self._queue_of(item.client), item, key=_priority)

    def remove(self, item: T) -> None:
        """Remove an item that ended before it started."""
        self._take(item)
        self._forget_idle()

    def start(self, item: T) -> None:
        """Take an item out of the queue to run it."""
        self._take(item)
        self._num_started[item.client] += 1
        self._clock = max(self._clock, self._served[item.client])

    def end(self, item: T) -> None:
        """Record that a started item ended."""
        self._num_started[item.client] -= 1
        self._forget_idle()

    def charge(self, client: str, amount: int) -> None:
        """Charge a client for service. amount: the rows that a step spent on a started item of this client."""
        self._served[client] += amount

    def num_started(self, client: str) -> int:
        """The number of items that have started and not ended."""
        return self._num_started[client]

    def _rank(self, client: str) -> tuple[int, int]:
        """The sort key of a client. Sorting is stable, so of equal clients the one that has waited longer comes first."""
        return self._served[client], self._num_started[client]

    def _queue_of(self, client: str) -> list[T]:
        """The queue of a client. A new or idle client starts with as much service as the others have had."""
        if client not in self._waiting:
            self._waiting[client] = []
            self._served[client] = max(self._served.get(client, 0), self._clock)
        return self._waiting[client]

    def _take(self, item: T) -> None:
        self._waiting[item.client].remove(item)
        if not self._waiting[item.client]:
            del self._waiting[item.client]

    def _forget_idle(self) -> None:
        """Drop the counters of idle clients that would restart like new ones; if no client is active, drop them all."""
        self._num_started = +self._num_started
        active = self._waiting.keys() | self._num_started.keys()
        if not active:
            self._served.clear()
            self._clock = 0
        self._served = {c: n for c, n in self._served.items() if c in active or n > self._clock}


def fair_shares(demands: Mapping[str, int], total: int) -> dict[str, int]:
    """Max-min fair shares: each client gets what it demands, up to an equal share of what smaller demands leave. What remains after
    all demands is split evenly."""
    shares: dict[str, int] = {}
    rest = total
    for client, demand in sorted(demands.items(), key=lambda pair: pair[1]):
        shares[client] = min(demand, rest // (len(demands) - len(shares)))
        rest -= shares[client]
    return {client: share + rest // len(shares) for client, share in shares.items()}
