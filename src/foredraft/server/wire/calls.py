"""What a chat's text holds beside text: calls, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from foredraft.server.tool_parsers import Arguments, CallBegun, Content, Piece, ToolParser
from foredraft.server.wire.base import Answer, if_any
from foredraft.server.wire.tools import new_call_id


class WrittenFunction(Answer):
    name: str
    arguments: str


class WrittenCall(Answer):
    id: str
    type: Literal["function"] = "function"
    function: WrittenFunction


class FunctionDelta(Answer):
    name: str | None = if_any()
    arguments: str


class CallDelta(Answer):
    """id, type and name come once, with the call's beginning; then its arguments in fragments."""

    index: int
    id: str | None = if_any()
    type: Literal["function"] | None = if_any()
    function: FunctionDelta


class TextReader:
    """One text taken apart as it is written. parser: None where no calls are looked for."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._num_calls = 0

    def read(self, text: str, *, is_end: bool) -> list[Piece]:
        if self._parser is None:
            return [Content(text)] if text else []
        pieces = self._parser.feed(text) + (self._parser.finish() if is_end else [])
        self._num_calls += sum(isinstance(piece, CallBegun) for piece in pieces)
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's, of a text that ended for this reason."""
        return "tool_calls" if self._num_calls and reason == "stop" else reason


class CallStream:
    """Numbers the calls of one text."""

    def __init__(self) -> None:
        self._index = -1

    def delta(self, piece: CallBegun | Arguments) -> CallDelta:
        if isinstance(piece, Arguments):
            return CallDelta(index=self._index, function=FunctionDelta(arguments=piece.text))
        self._index += 1
        function = FunctionDelta(name=piece.name, arguments="")
        return CallDelta(index=self._index, id=new_call_id(), type="function", function=function)


class Sorted(NamedTuple):
    content: str
    calls: list[WrittenFunction]


def sorted_pieces(pieces: Sequence[Piece]) -> Sorted:
    """All content, in order, and the calls."""
    found = Sorted("".join(piece.text for piece in pieces if isinstance(piece, Content)), [])
    for piece in pieces:
        if isinstance(piece, CallBegun):
            found.calls.append(WrittenFunction(name=piece.name, arguments=""))
        elif isinstance(piece, Arguments):
            found.calls[-1].arguments += piece.text
    return found
