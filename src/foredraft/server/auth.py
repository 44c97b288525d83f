"""Checks the API key and the Host header, before the body is read."""

from __future__ import annotations

import hmac
from collections.abc import Sequence, Set
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.server.api_errors import ApiError
from foredraft.server.request_log import LOG_FIELDS

CLIENT = "foredraft.client"
"""The key under which a request's scope has its client: the number of the client's API key, or else its address."""
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class AuthMiddleware:
    """api_keys: if empty, no key is needed. allowed_hosts: None allows every Host header. public_paths: paths that need no key."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], allowed_hosts: Set[str] | None, public_paths: Set[str]
    ) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._allowed_hosts = allowed_hosts
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._allowed_hosts is not None and host_name(headers.get("host", "")) not in self._allowed_hosts:
            return ApiError(
                400, "the Host header is not one of the names that this server answers to", code="wrong_host"
            )
        if not self._keys:
            # in a replica the front has set it already
            scope.setdefault(CLIENT, (scope.get("client") or ("", 0))[0])
            return None
        if scope["path"] in self._public_paths:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        number = self._key_number(given) if scheme.lower() == "bearer" else None
        if number is not None:
            scope[CLIENT] = f"key-{number}"
            scope.get(LOG_FIELDS, {})["client"] = scope[CLIENT]
            return None
        return ApiError(
            401,
            "an API key is needed: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _key_number(self, given: str) -> int | None:
        """The number of the key, from 1; None if it is wrong. All keys are compared, so the time reveals nothing."""
        digest = _digest(given.strip().encode("latin-1"))
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return matches.index(True) + 1 if any(matches) else None


def _digest(key: bytes) -> bytes:
    """All digests have the same length, so the comparison does not reveal the length of the key."""
    return sha256(key).digest()


def host_name(host: str) -> str:
    """A Host header without its port, and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
