"""A body of JSON, read strictly: what RFC 8259 has no place for, and what nobody can answer to, is refused by name."""

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

from foredraft.server.errors import ApiError, one_line

_MOST_DEEP = 200
"""pydantic's own bound for JSON."""
_MOST_DIGITS = 4300
"""Python's own bound for integers that are read."""
_MOST_OF_NAME = 100
"""Characters of a field's name that are shown."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAY_OVERFLOW = re.compile(rb"[eE]\+?[0-9]{3}|(?<![0-9])[0-9]{309}")


class JsonRoute(APIRoute):
    """Its bodies go through `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_strictly


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(raw: bytes) -> Any:
    """Raises ApiError 400, which names the field and the reason."""
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _explanation(raw, str(error)) from None
    if _MAY_OVERFLOW.search(raw) and (fault := _first_fault(value)) is not None:
        raise fault
    return value


@dataclass(frozen=True, slots=True)
class _Odd:
    """Stands for a number that cannot be. reason: what is wrong with it."""

    reason: str


def _explanation(raw: bytes, reason: str) -> ApiError:
    """Why a body cannot be read; slower than to read it, and the more exact. reason: what the parser said."""
    try:
        text = raw.decode()
        value = json.loads(text, parse_constant=_constant, parse_int=_integer)
    except UnicodeDecodeError as error:
        return ApiError(
            400, f"the body is not UTF-8: it has the byte {raw[error.start]:#04x} at position {error.start}"
        )
    except json.JSONDecodeError as error:
        return ApiError(400, f"the body is no JSON: {error.msg}, at character {error.pos}")
    except RecursionError:
        return _too_deep()
    return _first_fault(value) or ApiError(400, f"the body is no JSON: {reason}")


def _constant(name: str) -> _Odd:
    return _Odd(f"{name} is no number in JSON")


def _integer(digits: str) -> int | _Odd:
    if len(digits) > _MOST_DIGITS:
        return _Odd(f"a number of {len(digits.lstrip('-'))} digits is too large")
    return int(digits)


def _first_fault(value: Any) -> ApiError | None:
    """The first in the order of the text. Without recursion."""
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    while stack:
        place, one = next(stack[-1], ("", stack))
        if one is stack:
            stack.pop()
            continue
        if (fault := _fault(place, one)) is not None:
            return fault
        if isinstance(one, dict | list):
            if len(stack) > _MOST_DEEP:
                return _too_deep()
            stack.append(_members(place, one))
    return None


def _members(place: str, value: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        return ((f"{place}[{index}]", one) for index, one in enumerate(value))
    return ((f"{place}.{one_line(name, _MOST_OF_NAME)}".removeprefix("."), one) for name, one in value.items())


def _fault(place: str, value: Any) -> ApiError | None:
    reason = None
    if isinstance(value, _Odd):
        reason = value.reason
    elif isinstance(value, float) and not math.isfinite(value):
        reason = "the number is too large"
    elif isinstance(value, str):
        reason = _lone_surrogate(value)
    elif isinstance(value, dict):
        for name in value:
            if (found := _lone_surrogate(name)) is not None:
                return _at(place, f"the field name {one_line(name, _MOST_OF_NAME)} {found}")
    return None if reason is None else _at(place, reason)


def _lone_surrogate(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"must be valid Unicode: it has the lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}"
    return None


def _at(place: str, reason: str) -> ApiError:
    return ApiError(400, f"{place or 'the body'}: {reason}", param=place or None)


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {_MOST_DEEP} deep")
