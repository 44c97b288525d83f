"""Bounds the number of open connections, and chooses which one to close when there are too many."""

from __future__ import annotations

from typing import Protocol


class Connection(Protocol):
    @property
    def is_answering(self) -> bool: ...

    def evict(self) -> None:
        """Close at once."""


class Connections:
    """The open connections, at most max_connections."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: dict[Connection, None] = {}  # the least recently used first

    def admit(self, connection: Connection) -> bool:
        """Add a connection; False if all are in use. When there are too many, the one that has waited longest for a request is
        closed, so a client that opens many connections and sends nothing only harms itself."""
        if len(self._open) >= self._max_connections:
            idle = next((other for other in self._open if not other.is_answering), None)
            if idle is None:
                return False
            self.remove(idle)
            idle.evict()
        self._open[connection] = None
        return True

    def mark_used(self, connection: Connection) -> None:
        """Note that a response was just sent on it."""
        if connection in self._open:
            del self._open[connection]
            self._open[connection] = None

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)
