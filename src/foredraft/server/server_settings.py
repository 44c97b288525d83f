"""The settings of a server, apart from its models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.server.tool_parsers import PARSERS

MEBIBYTE = 1 << 20
AUTO, NONE = "auto", "none"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""The form in which browsers send an origin: in lower case, without a path."""


_MINIMA = {
    "max_body_bytes": 1,
    "max_prompt_tokens": 1,
    "max_queue": 0,
    "max_request_line_bytes": 64,
    "max_header_bytes": 256,
    "max_headers": 1,
    "max_connections": 1,
}


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests and connections. None: no limit.

    max_body_bytes: a larger body is answered with 413.
    max_prompt_tokens: a longer prompt is answered with 400. None: the context length.
    max_queue: texts that may wait while the engine is full; more are answered with 429.
    request_seconds: from a request's arrival to its end, else 408; a stream that has started ends with an error.
    body_seconds: until the body has arrived, else 408.
    header_seconds: until the request line and the headers have arrived, else 408.
    write_seconds: how long a client may leave a response unread before its connection is closed.
    keep_alive_seconds: how long a connection may wait for its next request.
    max_request_line_bytes: a longer request line is answered with 414.
    max_header_bytes, max_headers: of the header fields, and of a body's trailer fields; more are answered with 431.
    max_connections: open at a time. One more closes the connection that has waited longest for a request; if all have requests,
        it is answered with 503.
    """

    max_body_bytes: int = 2 * MEBIBYTE
    max_prompt_tokens: int | None = None
    max_queue: int = 256
    request_seconds: float | None = 600.0
    body_seconds: float = 30.0
    header_seconds: float = 30.0
    write_seconds: float = 30.0
    keep_alive_seconds: int = 75
    max_request_line_bytes: int = 8192
    max_header_bytes: int = 32768
    max_headers: int = 100
    max_connections: int = 1024

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ForedraftError(f"{name} must be at least {minimum}, not {value}")
        for name in ("request_seconds", "body_seconds", "header_seconds", "write_seconds", "keep_alive_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ForedraftError(f"{name} must be more than 0, not {value}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of a server.

    model_names: the names that requests may use for the model; the first one is shown.
    api_key: one or several keys, one of which a client must send as a bearer token. Each key is one client for fair sharing.
        None: no key is needed.
    allowed_hosts: the Host headers that are accepted, so that a web page cannot reach a server on this machine under a name of
        its own (DNS rebinding). None: all.
    allowed_origins: web pages whose scripts may read responses, such as https://example.com, or *.
    chat_template: Jinja, used instead of the checkpoint's.
    trust_request_chat_template: accept templates in requests. A template can run for an unlimited time.
    log_prompts: log prompts and texts.
    show_text: show prompts and texts on the live page.
    strict: reject requests with unknown fields; otherwise they are ignored, and the response's headers name them.
    tool_call_parser: how the model writes tool calls, one of PARSERS. AUTO: detected from the chat template. NONE: calls stay text.
    """

    model_names: tuple[str, ...] = ("foredraft",)
    api_key: str | tuple[str, ...] | None = field(default=None, repr=False)
    allowed_hosts: frozenset[str] | None = None
    allowed_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    limits: RequestLimits = RequestLimits()
    log_prompts: bool = False
    show_text: bool = False
    strict: bool = False
    tool_call_parser: str = AUTO

    def __post_init__(self) -> None:
        if not self.model_names:
            raise ForedraftError("a model needs at least one name")
        if self.tool_call_parser not in (AUTO, NONE, *PARSERS):
            names = ", ".join((AUTO, *PARSERS, NONE))
            raise ForedraftError(f"tool_call_parser must be one of {names}, not {self.tool_call_parser!r}")
        if self.api_key is not None and not (self.api_keys and all(self.api_keys)):
            raise ForedraftError("the API key is empty: give a key, or leave it out")
        bad = next((origin for origin in self.allowed_origins if origin != "*" and not _ORIGIN.fullmatch(origin)), None)
        if bad is not None:
            raise ForedraftError(
                f"{bad!r} is not an origin: write one like https://example.com or http://localhost:3000, or *"
            )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys without duplicates; empty if no key is needed."""
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(dict.fromkeys(self.api_key))
