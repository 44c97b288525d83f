"""Waits for clients to disconnect."""

from __future__ import annotations

from starlette.types import Receive


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client disconnects. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
