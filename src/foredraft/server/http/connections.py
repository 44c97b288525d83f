"""How many connections are open, and which one goes when there are too many."""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    @property
    def is_answering(self) -> bool: ...

    def evict(self) -> None:
        """Close at once."""


class Connections:
    """most: that may be open at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Connection, None] = {}  # those that were last of use last

    def admit(self, one: Connection) -> bool:
        """Whether there is a place for it. Where all are taken, the connection goes that has waited longest without a request:
        who opens many and sends nothing takes only from itself."""
        if len(self._open) >= self._most:
            idle = next((other for other in self._open if not other.is_answering), None)
            if idle is None:
                return False
            self.leave(idle)
            idle.evict()
        self._open[one] = None
        return True

    def served(self, one: Connection) -> None:
        """It was just answered."""
        if one in self._open:
            del self._open[one]
            self._open[one] = None

    def leave(self, one: Connection) -> None:
        self._open.pop(one, None)
