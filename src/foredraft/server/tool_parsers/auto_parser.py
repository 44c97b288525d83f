"""Finds calls that the model makes on its own (tool_choice: auto). Anything but a complete, valid call stays text."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Set
from typing import NamedTuple

from foredraft.server.tool_parsers.json_scanner import JsonScanner, Span, is_object
from foredraft.server.tool_parsers.parsed_pieces import CallArguments, CallStart, Content, Piece, merge_adjacent

BLANKS = " \t\r\n"


class Opening(NamedTuple):
    """The opening tag of a call and the blanks before it: text[start:end]."""

    start: int
    end: int


class AutoToolParser(ABC):
    """The base of parsers for calls inside text. A call is returned when it is complete, since text that was sent cannot be taken
    back. Blanks next to a call are dropped.

    tool_names: a call of any other name is text. parallel: False accepts the first call only.
    """

    argument_keys: tuple[str, ...]
    """Possible keys of the member with the arguments."""
    closing: str
    """The closing tag that follows the object, after optional blanks."""

    def __init__(self, tool_names: Set[str], *, parallel: bool = True) -> None:
        self._tool_names = tool_names
        self._parallel = parallel
        self._text = ""  # text that was not returned yet
        self._call: tuple[Opening, JsonScanner] | None = None
        self.num_calls = 0
        self.is_beside_call = False
        """Whether only blanks followed the last call."""

    @abstractmethod
    def find_opening(self, text: str) -> Opening | None:
        """The first opening."""

    @abstractmethod
    def num_pending(self, text: str) -> int:
        """The number of characters at the end of a text that may become an opening; trailing blanks count."""

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
        return merge_adjacent(pieces)

    def _read_content(self, *, is_end: bool) -> list[Piece] | None:
        """The content before the next call; None: wait for more text."""
        opening = self.find_opening(self._text) if self._parallel or not self.num_calls else None
        if opening is not None:
            content = self._take_content(opening.start)
            opening = Opening(0, opening.end - opening.start)
            self._call = opening, JsonScanner(opening.end)
            return content
        end = len(self._text) - (0 if is_end else self.num_pending(self._text))
        return self._take_content(end) if end else None

    def _read_call(self, *, is_end: bool) -> list[Piece] | None:
        assert self._call is not None
        opening, scanner = self._call
        scanner.read(self._text)
        end = self._end(scanner)
        if end is None and not (scanner.is_broken or is_end):
            return None
        self._call = None
        call = None if not end else parse_call(self._text, scanner.members, self._tool_names, self.argument_keys)
        if call is None:  # the rest may contain another call
            return self._take_content(max(opening.end, 1))
        self._text = self._text[end:]
        self.num_calls += 1
        self.is_beside_call = True
        return call

    def _end(self, scanner: JsonScanner) -> int | None:
        """The end of the call; 0 if its closing tag is wrong, None if more text is needed."""
        if not scanner.is_done:
            return None
        rest = self._text[scanner.position :].lstrip(BLANKS)
        if rest.startswith(self.closing):
            return len(self._text) - len(rest) + len(self.closing)
        return None if self.closing.startswith(rest) else 0

    def _take_content(self, end: int) -> list[Piece]:
        text, self._text = self._text[:end], self._text[end:]
        if self.is_beside_call:
            text = text.lstrip(BLANKS)
        if text:
            self.is_beside_call = False
        return [Content(text)]


def parse_call(
    text: str, members: dict[str, Span], tool_names: Set[str], argument_keys: tuple[str, ...]
) -> list[Piece] | None:
    """The call that an object describes, or None. The arguments stay as the model wrote them: an object, or a string with one."""
    key = next((key for key in argument_keys if key in members), None)
    if key is None or "name" not in members:
        return None
    name, arguments = (text[span.start : span.end] for span in (members["name"], members[key]))
    name = json.loads(name) if name.startswith('"') else ""
    if arguments.startswith('"'):
        arguments = json.loads(arguments)
    is_valid = name in tool_names and is_object(arguments) and _is_unicode(arguments)
    return [CallStart(name), CallArguments(arguments)] if is_valid else None


def _is_unicode(text: str) -> bool:
    """A JSON string may have half of a surrogate pair, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
