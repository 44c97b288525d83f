"""Who may ask: the key, and the name under which a client reached us. Looked at before anything is read."""

from __future__ import annotations

import hmac
from collections.abc import Sequence, Set
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.server.errors import ApiError
from foredraft.server.logging import NOTE

CLIENT = "foredraft.client"
"""Where a request's scope keeps whose it is: the number of its key, else the address that it came from."""
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """api_keys: none means that nothing is asked for. public: paths that need no key."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], allowed_hosts: Set[str] | None, public: Set[str]
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._allowed_hosts = allowed_hosts
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._allowed_hosts is not None and host_name(headers.get("host", "")) not in self._allowed_hosts:
            return ApiError(400, "this server answers only under the names it was given", code="wrong_host")
        if not self._keys:
            # a replica is told by the front
            scope.setdefault(CLIENT, (scope.get("client") or ("", 0))[0])
            return None
        if scope["path"] in self._public:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        number = self._number_of(given) if scheme.lower() == "bearer" else None
        if number is not None:
            scope[CLIENT] = f"key-{number}"
            scope.get(NOTE, {})["client"] = scope[CLIENT]
            return None
        return ApiError(
            401,
            "a key is needed: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _number_of(self, given: str) -> int | None:
        """The place of the key among ours, from 1. All are compared, so that the time tells nothing of it."""
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return matches.index(True) + 1 if any(matches) else None


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about the key's."""
    return sha256(key).digest()


def host_name(host: str) -> str:
    """Without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
