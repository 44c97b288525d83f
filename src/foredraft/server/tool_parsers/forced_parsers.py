"""Parses calls that tool_choice requires. The text is constrained to their form, so they are streamed while they are generated."""

from __future__ import annotations

import json
from collections.abc import Set

from foredraft.server.tool_parsers.auto_parser import BLANKS
from foredraft.server.tool_parsers.json_scanner import JsonScanner
from foredraft.server.tool_parsers.parsed_pieces import CallArguments, CallStart, Content, Piece, merge_adjacent

NAME, PARAMETERS = "name", "parameters"
"""Keys of each object of the list."""


class NamedParser:
    """Parses a text that is the arguments of one named tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        begun: list[Piece] = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*begun, CallArguments(text)]

    def finish(self) -> list[Piece]:
        return []


class RequiredParser:
    """Parses a list of calls: [{"name": ..., "parameters": {...}}, ...]. If the text ends before the first call has its name, it is
    content; the beginning of a later call is dropped. If the text has another form, everything from there on is content."""

    def __init__(self, tool_names: Set[str]) -> None:
        self._tool_names = tool_names
        self._text = ""  # after the last call
        self._num_calls = 0
        self._call: JsonScanner | None = None
        self._num_sent: int | None = None  # the end of the arguments that were returned; None: the call has not started
        self._is_content = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return merge_adjacent(pieces)

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        if self._call is not None and self._num_sent is not None:
            is_whole = PARAMETERS in self._call.members
            return merge_adjacent([CallArguments("" if is_whole else text[self._num_sent :])])
        return merge_adjacent([Content("" if self._num_calls else text)])

    def _step(self, pieces: list[Piece]) -> bool:
        """Append pieces; returns whether another step may find more."""
        if self._is_content:
            pieces.append(Content(self._text))
            self._text = ""
            return False
        return self._find_call() if self._call is None else self._read_call(self._call, pieces)

    def _find_call(self) -> bool:
        rest = self._text.lstrip(BLANKS)
        if not rest or (self._num_calls and rest.rstrip(BLANKS) == "]"):
            return False
        after = rest[1:].lstrip(BLANKS)
        if rest[0] != ("," if self._num_calls else "["):
            self._is_content = True
        elif after:
            self._call = JsonScanner(len(self._text) - len(after), max_digits=None)
        else:
            return False
        return True

    def _read_call(self, call: JsonScanner, pieces: list[Piece]) -> bool:
        call.read(self._text)
        pieces += self._arguments(call)
        if not (call.is_done or call.is_broken):
            return False
        if self._num_sent is not None:
            self._text = self._text[call.position if call.is_done else self._num_sent :]
            self._num_calls += 1
        self._is_content = call.is_broken or self._num_sent is None
        self._call = self._num_sent = None
        return True

    def _arguments(self, call: JsonScanner) -> list[Piece]:
        """New arguments of the call, after its start if they are the first."""
        name = self._name(call)
        if name is None:
            return []
        if PARAMETERS in call.members:
            start, end = call.members[PARAMETERS]
        elif call.open_member is not None and call.open_member[0] == PARAMETERS:
            start, end = call.open_member[1], call.position
        else:
            return []
        begun: list[Piece] = [CallStart(name)] if self._num_sent is None else []
        start, self._num_sent = max(start, self._num_sent or 0), end
        return [*begun, CallArguments(self._text[start:end])]

    def _name(self, call: JsonScanner) -> str | None:
        if NAME not in call.members:
            return None
        start, end = call.members[NAME]
        text = self._text[start:end]
        name = json.loads(text) if text.startswith('"') else None
        return name if name in self._tool_names else None
