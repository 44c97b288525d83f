"""A request that is forwarded to a replica."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from foredraft.server.auth import CLIENT
from foredraft.server.request_log import REQUEST_ID

PREFIX_CHARACTERS = 256
"""Characters of a prompt by which its replica is chosen. Prompts with a shorter common prefix gain little from a shared cache."""

_HEADERS = (b"content-type", b"content-length", b"accept", b"last-event-id")
"""Headers that are forwarded. API keys are not; the request id is the one in the front's log."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """prefix: the start of the prompt; empty if there is none. client: of the request, for fair sharing."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    prefix: str
    client: str = ""

    @classmethod
    def of(cls, scope: MutableMapping[str, Any], body: bytes) -> ForwardedRequest:
        headers = tuple((name, value) for name, value in scope["headers"] if name.lower() in _HEADERS)
        if REQUEST_ID in scope:
            headers += ((b"x-request-id", scope[REQUEST_ID].encode()),)
        client = scope.get(CLIENT, "")
        return cls(scope["method"], scope["path"], scope["query_string"], headers, body, prefix_of(body), client)

    def scope(self) -> dict[str, Any]:
        """The ASGI scope."""
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
    """The start of a body's prompt, messages or input as text. Empty for an invalid body: the replica answers with the error."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = next((fields[name] for name in ("messages", "prompt", "input") if name in fields), None)
    if isinstance(prompt, str):
        return prompt[:PREFIX_CHARACTERS]
    return "" if prompt is None else json.dumps(prompt)[:PREFIX_CHARACTERS]
