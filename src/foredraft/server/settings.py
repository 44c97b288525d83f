"""What a server is told, beside its models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.server.tool_parsers import PARSERS

MEBIBYTE = 1 << 20
AUTO, NONE = "auto", "none"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""As browsers send it: in lower case, without a path."""


_LEAST = {
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
    """What one client may ask of the others. None: no limit.

    max_body_bytes: of a request, else 413. max_prompt_tokens: else 400; None: what the context holds. max_queue: texts
    that may wait while as many as the engine takes are written, else 429. request_seconds: from arrival to the end, and
    body_seconds until the body is there, else 408; a stream that has begun ends with an error. header_seconds: until the
    request line and headers are there; write_seconds: that a client may leave an answer unread, before the connection
    is cut; keep_alive_seconds: that a connection may wait for its next request. max_request_line_bytes: else 414.
    max_header_bytes and max_headers: of the header fields, and of a body's trailer fields, else 431. max_connections: that
    are open at a time; one more takes the place of one that waits for a request, or is answered 503.
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
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ForedraftError(f"{name} must be at least {least}, not {value}")
        for name in ("request_seconds", "body_seconds", "header_seconds", "write_seconds", "keep_alive_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ForedraftError(f"{name} must be more than 0, not {value}")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """model_names: by which clients may ask for the model; the first one is shown. api_key: what a client must send as a
    bearer token, or several, one of them; whose key it is decides which requests share fairly. None asks for nothing.
    allowed_hosts: the names in a Host header that are answered, so that a web page elsewhere cannot reach a server on this
    machine under a name of its own; None: any. allowed_origins: of web pages whose scripts may read answers, as
    https://example.com, or *. chat_template: Jinja, in the place of the checkpoint's. trust_request_chat_template: take a
    template from a request; it can run for as long as it likes. log_prompts: put prompts and texts into the log. show_text:
    show them on the live page. strict: refuse requests with fields that are not known; else they are ignored, and the answer's
    headers say which. tool_call_parser: the form in which the model calls tools, one of PARSERS; AUTO: what the chat template
    shows; NONE: calls stay text.
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
            raise ForedraftError("the API key is empty: give one, or none")
        bad = next((one for one in self.allowed_origins if one != "*" and not _ORIGIN.fullmatch(one)), None)
        if bad is not None:
            raise ForedraftError(
                f"{bad!r} is no origin: write it as https://example.com or http://localhost:3000, or *"
            )

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Each of them opens; none: nothing is asked for."""
        if self.api_key is None:
            return ()
        return (self.api_key,) if isinstance(self.api_key, str) else tuple(dict.fromkeys(self.api_key))
