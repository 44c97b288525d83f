"""Parses JSON bodies strictly (RFC 8259). An error names the field and the reason."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from foredraft.server.api_errors import ApiError, one_line

_MAX_DEPTH = 200
"""pydantic's own limit for JSON, except that it takes an empty list or object one level deeper."""
_MAX_DIGITS = 4300
"""Python's own limit for parsing integers."""
_MAX_NAME_CHARACTERS = 100
"""Characters of a field's name in a message."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAY_OVERFLOW = re.compile(rb"[eE]\+?[0-9]{3}|(?<![0-9])[0-9]{309}")


class JsonRoute(APIRoute):
    """A route that parses its bodies with `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(raw: bytes) -> Any:
    """Raises ApiError 400, with the field and the reason."""
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _explanation(raw, str(error)) from None
    if _may_have_fault(raw) and (fault := _first_fault(value)) is not None:
        raise fault
    return value


def _may_have_fault(raw: bytes) -> bool:
    """Whether the fast parser may have accepted a number that overflows or nesting that is too deep."""
    return _MAY_OVERFLOW.search(raw) is not None or raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH


@dataclass(frozen=True, slots=True)
class _InvalidNumber:
    """Takes the place of a number that JSON or Python cannot represent. reason: what is wrong with it."""

    reason: str


def _explanation(raw: bytes, reason: str) -> ApiError:
    """Parses a bad body again, more slowly, to say what is wrong with it. reason: the error of the fast parser."""
    try:
        text = raw.decode()
        value = json.loads(text, parse_constant=_constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        return ApiError(
            400, f"the body is not UTF-8: it contains the byte {raw[error.start]:#04x} at position {error.start}"
        )
    except json.JSONDecodeError as error:
        return ApiError(400, f"the body is not JSON: {error.msg}, at character {error.pos}")
    except RecursionError:
        return _too_deep()
    return _first_fault(value) or ApiError(400, f"the body is not JSON: {reason}")


def _constant(name: str) -> _InvalidNumber:
    return _InvalidNumber(f"{name} is not a number in JSON")


def _integer(digits: str) -> int | _InvalidNumber:
    if len(digits) > _MAX_DIGITS:
        return _InvalidNumber(f"a number with {len(digits.lstrip('-'))} digits is too large")
    return int(digits)


def _first_fault(value: Any) -> ApiError | None:
    """The first fault in the order of the text. Works without recursion, since a body may be deeply nested."""
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    while stack:
        path, member = next(stack[-1], ("", stack))
        if member is stack:  # the end of a container
            stack.pop()
            continue
        if (fault := _fault(path, member)) is not None:
            return fault
        if isinstance(member, dict | list):
            if len(stack) > _MAX_DEPTH:
                return _too_deep()
            stack.append(_members(path, member))
    return None


def _members(path: str, value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """The members of a container, each with its path."""
    if isinstance(value, list):
        return ((f"{path}[{index}]", item) for index, item in enumerate(value))
    return (
        (f"{path}.{one_line(name, _MAX_NAME_CHARACTERS)}".removeprefix("."), member) for name, member in value.items()
    )


def _fault(path: str, value: Any) -> ApiError | None:
    reason = None
    if isinstance(value, _InvalidNumber):
        reason = value.reason
    elif isinstance(value, float) and not math.isfinite(value):
        reason = "the number is too large"
    elif isinstance(value, str):
        reason = _lone_surrogate(value)
    elif isinstance(value, dict):
        for name in value:
            if (surrogate := _lone_surrogate(name)) is not None:
                return _error_at(path, f"the field name {one_line(name, _MAX_NAME_CHARACTERS)} {surrogate}")
    return None if reason is None else _error_at(path, reason)


def _lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"must be valid Unicode: it contains the lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}"
    return None


def _error_at(path: str, reason: str) -> ApiError:
    return ApiError(400, f"{path or 'the body'}: {reason}", param=path or None)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {_MAX_DEPTH} levels deep")
