"""Calls that a model may write into its text, when it likes and as it likes. What is no whole and good call stays text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Set
from typing import NamedTuple

from foredraft.server.tool_parsers.pieces import Arguments, CallBegun, Content, Piece, joined
from foredraft.server.tool_parsers.scanner import JsonScanner, Span, is_object

BLANKS = " \t\r\n"


class Opening(NamedTuple):
    """text[start:end]: blanks, and what a call begins with."""

    start: int
    end: int


class TentativeParser(ABC):
    """A call is given out when all of it is there: nothing that was sent can be taken back. Blanks beside a call belong to it.

    tool_names: that may be called; a call of another is text. parallel: False takes the first call only.
    """

    argument_keys: tuple[str, ...]
    """Names of the member with the arguments."""
    closing: str
    """What stands behind the object, blanks between allowed."""

    def __init__(self, tool_names: Set[str], *, parallel: bool = True) -> None:
        self._tool_names = tool_names
        self._parallel = parallel
        self._text = ""  # that is not given out
        self._call: tuple[Opening, JsonScanner] | None = None
        self.num_calls = 0
        self.is_beside_call = False
        """Behind a call, with nothing but blanks between."""

    @abstractmethod
    def opening(self, text: str) -> Opening | None:
        """The first one."""

    @abstractmethod
    def num_waiting(self, text: str) -> int:
        """Characters at the end of a text without an opening that may become one; blanks at its end are among them."""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._read(is_end=False)

    def finish(self) -> list[Piece]:
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._text:
            done = self._read_call(is_end=is_end) if self._call else self._read_content(is_end=is_end)
            if done is None:
                break
            pieces += done
        return joined(pieces)

    def _read_content(self, *, is_end: bool) -> list[Piece] | None:
        """None: wait for more."""
        opening = self.opening(self._text) if self._parallel or not self.num_calls else None
        if opening is not None:
            found = self._give(opening.start)
            opening = Opening(0, opening.end - opening.start)
            self._call = opening, JsonScanner(opening.end)
            return found
        end = len(self._text) - (0 if is_end else self.num_waiting(self._text))
        return self._give(end) if end else None

    def _read_call(self, *, is_end: bool) -> list[Piece] | None:
        assert self._call is not None
        opening, scanner = self._call
        scanner.read(self._text)
        end = self._end(scanner)
        if end is None and not (scanner.is_broken or is_end):
            return None
        self._call = None
        call = None if not end else call_in(self._text, scanner.members, self._tool_names, self.argument_keys)
        if call is None:  # the rest may hold another one
            return self._give(max(opening.end, 1))
        self._text = self._text[end:]
        self.num_calls += 1
        self.is_beside_call = True
        return call

    def _end(self, scanner: JsonScanner) -> int | None:
        """Where the call ends; 0 if it has no good end, None if that is to be seen."""
        if not scanner.is_done:
            return None
        rest = self._text[scanner.position :].lstrip(BLANKS)
        if rest.startswith(self.closing):
            return len(self._text) - len(rest) + len(self.closing)
        return None if self.closing.startswith(rest) else 0

    def _give(self, end: int) -> list[Piece]:
        text, self._text = self._text[:end], self._text[end:]
        if self.is_beside_call:
            text = text.lstrip(BLANKS)
        if text:
            self.is_beside_call = False
        return [Content(text)]


def call_in(
    text: str, members: dict[str, Span], tool_names: Set[str], argument_keys: tuple[str, ...]
) -> list[Piece] | None:
    """The call that an object is; None if it is none. Arguments are as the model wrote them: an object, or a string of one."""
    key = next((key for key in argument_keys if key in members), None)
    if key is None or "name" not in members:
        return None
    name, arguments = (text[span.start : span.end] for span in (members["name"], members[key]))
    name = json.loads(name) if name.startswith('"') else ""
    if arguments.startswith('"'):
        arguments = json.loads(arguments)
    is_good = name in tool_names and is_object(arguments) and _is_unicode(arguments)
    return [CallBegun(name), Arguments(arguments)] if is_good else None


def _is_unicode(text: str) -> bool:
    """A string of JSON may hold half of a surrogate pair, which cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
