"""One JSON object, read as it is written. In time linear in its length, wherever it is cut, and to any depth."""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple

_BLANKS = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_RUN = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MOST_DIGITS = 1000
"""Of a number; a longer one breaks the object."""

_Want = Literal["object", "first key", "key", "colon", "first value", "value", "next"]


class Span(NamedTuple):
    """Of the text: text[start:end]."""

    start: int
    end: int


class JsonScanner:
    """Reads an object that begins at `start` of a text, blanks in front allowed. The text may grow between two calls of
    `read`; what was read must not change.

    position: how far it has read; behind a whole object, its end. members: the object's own keys and where their values
    stand. open_member: the key and start of a value that has begun and not ended.
    """

    def __init__(self, start: int = 0) -> None:
        self.position = start
        self.members: dict[str, Span] = {}
        self.open_member: tuple[str, int] | None = None
        self.is_broken = False
        self.is_done = False
        self._want: _Want = "object"
        self._closers: list[str] = []
        self._string_start: int | None = None
        self._key = ""

    def read(self, text: str) -> None:
        """As far as it goes: to the object's end, to the text's, or to what is no JSON."""
        while not (self.is_done or self.is_broken):
            before = self.position
            if self._string_start is None:
                self._read_token(text)
            else:
                self._read_string(text, self._string_start)
            if self.position == before:
                return

    def _read_token(self, text: str) -> None:
        at = self.position = _BLANKS.match(text, self.position).end()  # type: ignore[union-attr]  # it matches nothing, too
        if at == len(text):
            return
        sign = text[at]
        if self._want == "object":
            self._open("}") if sign == "{" else self._break()
        elif self._want == "colon":
            self._expect("value") if sign == ":" else self._break()
        elif self._want == "next" and sign == ",":
            self._expect("key" if self._closers[-1] == "}" else "value")
        elif self._want in ("next", "first key", "first value") and sign == self._closers[-1]:
            self._close()
        elif self._want in ("key", "first key"):
            self._open_string() if sign == '"' else self._break()
        elif self._want in ("value", "first value"):
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
        start, end = self.position, _RUN.match(text, self.position).end()  # type: ignore[union-attr]
        if end - start > _MOST_DIGITS or end == start:
            self._break()
        elif end < len(text):  # else it may go on
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
        elif not _BEGUN_ESCAPE.fullmatch(text, at):
            self._break()

    def _end_string(self, string: str) -> None:
        if self._want not in ("key", "first key"):
            self._end_value()
            return
        if len(self._closers) == 1:
            self._key = json.loads(string)
        self._want = "colon"

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
        self._want = "next"
        if len(self._closers) == 1 and self.open_member is not None:
            key, start = self.open_member
            self.members[key] = Span(start, self.position)
            self.open_member = None

    def _expect(self, want: _Want) -> None:
        self.position += 1
        self._want = want

    def _break(self) -> None:
        self.is_broken = True


def is_object(text: str) -> bool:
    """Whether the text is one JSON object, blanks around it allowed."""
    scanner = JsonScanner()
    scanner.read(text)
    return scanner.is_done and not text[scanner.position :].strip(" \t\r\n")
