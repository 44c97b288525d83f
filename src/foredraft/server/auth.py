"""Who may ask: the key, and the name under which a client reached us. Looked at before anything is read."""

from __future__ import annotations

import hmac
from collections.abc import Set
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.server.errors import ApiError

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """public: paths that need no key."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, allowed_hosts: Set[str] | None, public: Set[str]) -> None:
        self._app = app
        self._api_key = None if api_key is None else _digest(api_key.encode())
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
        if self._api_key is None or scope["path"] in self._public:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(_digest(given.strip().encode("latin-1")), self._api_key):
            return None
        return ApiError(
            401,
            "a key is needed: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _digest(key: bytes) -> bytes:
    """Of one length, so that comparing tells nothing about the key's."""
    return sha256(key).digest()


def host_name(host: str) -> str:
    """Without its port, and an IPv6 address without its brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
