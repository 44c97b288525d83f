"""An incremental scanner of one JSON object. It takes linear time, however the text is split, and any depth."""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple

_BLANKS = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_RUN = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MAX_DIGITS = 1000
"""Characters of a number in text that is not constrained."""

_Token = Literal["object", "first key", "key", "colon", "first value", "value", "next"]


class Span(NamedTuple):
    """A part of the text: text[start:end]."""

    start: int
    end: int


class JsonScanner:
    """Scans an object that begins at `start` of a text, after optional blanks. The text may grow between two calls of `read`, but
    what was scanned must not change.

    position: the end of what was scanned. members: the spans of the values of the outermost object, by key. open_member: the key
    and start of a value that has started and not ended. is_broken: the text is not JSON. is_done: the object is complete.
    max_digits: characters of a number; a longer one is an error. None: any number.
    """

    def __init__(self, start: int = 0, *, max_digits: int | None = _MAX_DIGITS) -> None:
        self.position = start
        self.members: dict[str, Span] = {}
        self.open_member: tuple[str, int] | None = None
        self.is_broken = False
        self.is_done = False
        self._max_digits = max_digits
        self._expected: _Token = "object"
        self._closers: list[str] = []
        self._string_start: int | None = None
        self._scalar_end = start  # how far a number that may continue was read
        self._key = ""

    def read(self, text: str) -> None:
        """Scan to the end of the object or of the text, or to an error."""
        while not (self.is_done or self.is_broken):
            before = self.position
            if self._string_start is None:
                self._read_token(text)
            else:
                self._read_string(text, self._string_start)
            if self.position == before:
                return

    def _read_token(self, text: str) -> None:
        at = self.position = _BLANKS.match(text, self.position).end()  # type: ignore[union-attr]  # it always matches
        if at == len(text):
            return
        sign = text[at]
        if self._expected == "object":
            self._open("}") if sign == "{" else self._break()
        elif self._expected == "colon":
            self._expect("value") if sign == ":" else self._break()
        elif self._expected == "next" and sign == ",":
            self._expect("key" if self._closers[-1] == "}" else "value")
        elif self._expected in ("next", "first key", "first value") and sign == self._closers[-1]:
            self._close()
        elif self._expected in ("key", "first key"):
            self._open_string() if sign == '"' else self._break()
        elif self._expected in ("value", "first value"):
            self._read_value(text, sign)
        else:
            self._break()

    def _read_value(self, text: str, sign: str) -> None:
        if len(self._closers) == 1 and self._closers[0] == "}" and self.open_member is None:
            self.open_member = (self._key, self.position)
        if sign in "{[":
            self._open("}" if sign == "{" else "]")
        elif sign == '"':
            self._open_string()
        else:
            self._read_scalar(text)

    def _read_scalar(self, text: str) -> None:
        start = self.position
        end = self._scalar_end = _RUN.match(text, max(start, self._scalar_end)).end()  # type: ignore[union-attr]
        is_too_long = self._max_digits is not None and end - start > self._max_digits
        if is_too_long or end == start:
            self._break()
        elif end < len(text):  # otherwise the number may continue
            self.position = end
            self._end_value() if _SCALAR.fullmatch(text, start, end) else self._break()

    def _read_string(self, text: str, start: int) -> None:
        at = self.position = _PLAIN.match(text, self.position).end()  # type: ignore[union-attr]
        if at == len(text):
            return
        if text[at] == '"':
            self.position += 1
            self._string_start = None
            self._end_string(text[start : self.position])
        elif escape := _ESCAPE.match(text, at):
            self.position = escape.end()
        elif not _PARTIAL_ESCAPE.fullmatch(text, at):
            self._break()

    def _end_string(self, string: str) -> None:
        if self._expected not in ("key", "first key"):
            self._end_value()
            return
        if len(self._closers) == 1:
            self._key = json.loads(string)
        self._expected = "colon"

    def _open_string(self) -> None:
        self._string_start = self.position
        self.position += 1

    def _open(self, closer: str) -> None:
        self._closers.append(closer)
        self._expect("first key" if closer == "}" else "first value")

    def _close(self) -> None:
        self._closers.pop()
        self.position += 1
        if self._closers:
            self._end_value()
        else:
            self.is_done = True

    def _end_value(self) -> None:
        self._expected = "next"
        if len(self._closers) == 1 and self.open_member is not None:
            key, start = self.open_member
            self.members[key] = Span(start, self.position)
            self.open_member = None

    def _expect(self, expected: _Token) -> None:
        self.position += 1
        self._expected = expected

    def _break(self) -> None:
        self.is_broken = True


def is_object(text: str, *, max_digits: int | None = _MAX_DIGITS) -> bool:
    """Whether the text is one JSON object, with optional blanks around it. max_digits: see JsonScanner."""
    scanner = JsonScanner(max_digits=max_digits)
    scanner.read(text)
    return scanner.is_done and not text[scanner.position :].strip(" \t\r\n")
