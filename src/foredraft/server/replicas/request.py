"""A request on its way to a replica."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from foredraft.server.auth import CLIENT
from foredraft.server.logging import REQUEST_ID

PREFIX_CHARACTERS = 256
"""Of a prompt, by which its replica is chosen: prompts that share fewer gain little from each other's keys and values."""

_HEADERS = (b"content-type", b"content-length", b"accept", b"last-event-id")
"""That a replica sees. Keys stay in front; of the request id it sees the one that stands in the log there."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a replica is told. prefix: how the prompt begins; empty where there is none. client: whose request it is."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    prefix: str
    client: str = ""

    @classmethod
    def of(cls, scope: MutableMapping[str, Any], body: bytes) -> Forwarded:
        headers = tuple((name, value) for name, value in scope["headers"] if name.lower() in _HEADERS)
        if REQUEST_ID in scope:
            headers += ((b"x-request-id", scope[REQUEST_ID].encode()),)
        client = scope.get(CLIENT, "")
        return cls(scope["method"], scope["path"], scope["query_string"], headers, body, prefix_of(body), client)

    def scope(self) -> dict[str, Any]:
        """As an ASGI server would give it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
            "state": {},
            CLIENT: self.client,
        }


def prefix_of(body: bytes) -> str:
    """The beginning of a body's messages or prompt, whatever its form. A body that cannot be read has none: the replica says
    what is wrong with it."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    prompt = next((found[name] for name in ("messages", "prompt", "input") if name in found), None)
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARACTERS]
    return "" if prompt is None else json.dumps(prompt)[:PREFIX_CHARACTERS]
