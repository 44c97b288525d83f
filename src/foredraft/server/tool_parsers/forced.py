"""Calls that were asked for: the text is held to their form, so that they are sent as they are written."""

from __future__ import annotations

import json
from collections.abc import Set

from foredraft.server.tool_parsers.pieces import Arguments, CallBegun, Content, Piece, joined
from foredraft.server.tool_parsers.scanner import JsonScanner
from foredraft.server.tool_parsers.tentative import BLANKS

NAME, PARAMETERS = "name", "parameters"
"""Members of each object of the list."""


class NamedParser:
    """The whole text is one tool's arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        begun: list[Piece] = [] if self._has_begun else [CallBegun(self._name)]
        self._has_begun = True
        return [*begun, Arguments(text)]

    def finish(self) -> list[Piece]:
        return []


class RequiredParser:
    """The text is a list: [{"name": ..., "parameters": {...}}, ...]. Where it is cut off before a call has its name, that part
    is content; so is what has another form, from there on."""

    def __init__(self, tool_names: Set[str]) -> None:
        self._tool_names = tool_names
        self._text = ""  # from the end of the last call
        self._num_calls = 0
        self._call: JsonScanner | None = None
        self._given: int | None = None  # how far the arguments of the call were sent; None: it has not begun
        self._is_content = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return joined(pieces)

    def finish(self) -> list[Piece]:
        text, self._text = self._text, ""
        if self._call is not None and self._given is not None:
            is_whole = PARAMETERS in self._call.members
            return joined([Arguments("" if is_whole else text[self._given :])])
        is_form = self._num_calls > 0 and self._call is None and text.strip(BLANKS) in ("", ",", "]")
        return joined([Content("" if is_form else text)])

    def _step(self, pieces: list[Piece]) -> bool:
        """Whether another one may find more."""
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
            self._call = JsonScanner(len(self._text) - len(after))
        else:
            return False
        return True

    def _read_call(self, call: JsonScanner, pieces: list[Piece]) -> bool:
        call.read(self._text)
        pieces += self._arguments(call)
        if not (call.is_done or call.is_broken):
            return False
        if self._given is not None:
            self._text = self._text[call.position if call.is_done else self._given :]
            self._num_calls += 1
        self._is_content = call.is_broken or self._given is None
        self._call = self._given = None
        return True

    def _arguments(self, call: JsonScanner) -> list[Piece]:
        """What can be sent of them, the call's beginning in front of the first part."""
        name = self._name(call)
        if name is None:
            return []
        if PARAMETERS in call.members:
            start, end = call.members[PARAMETERS]
        elif call.open_member is not None and call.open_member[0] == PARAMETERS:
            start, end = call.open_member[1], call.position
        else:
            return []
        begun: list[Piece] = [CallBegun(name)] if self._given is None else []
        start, self._given = max(start, self._given or 0), end
        return [*begun, Arguments(self._text[start:end])]

    def _name(self, call: JsonScanner) -> str | None:
        if NAME not in call.members:
            return None
        start, end = call.members[NAME]
        text = self._text[start:end]
        name = json.loads(text) if text.startswith('"') else None
        return name if name in self._tool_names else None
