"""What uvicorn's request cycle writes a response to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class CycleTransport:
    """A connection's transport, except that the connection itself decides how it closes. close: what it does then."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
