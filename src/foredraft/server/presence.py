"""Whether a client is still there."""

from __future__ import annotations

from starlette.types import Receive


async def until_gone(receive: Receive) -> None:
    """Ends when the client goes away. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
