"""Tool calls in the responses of a chat, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from foredraft.server.tool_parsers import CallArguments, CallStart, Content, Piece, ToolParser
from foredraft.server.tool_parsers.json_scanner import is_object
from foredraft.server.wire.models import ResponseModel, omit_if_none
from foredraft.server.wire.tool_use import new_call_id


class MessageFunctionCall(ResponseModel):
    name: str
    arguments: str


class MessageToolCall(ResponseModel):
    id: str
    type: Literal["function"] = "function"
    function: MessageFunctionCall


class FunctionDelta(ResponseModel):
    name: str | None = omit_if_none()
    arguments: str


class ToolCallDelta(ResponseModel):
    """The first delta of a call has its id, type and name; the later ones have fragments of its arguments."""

    index: int
    id: str | None = omit_if_none()
    type: Literal["function"] | None = omit_if_none()
    function: FunctionDelta


class ToolCallReader:
    """Splits one text into content and calls while it is generated. parser: None: do not look for calls."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._arguments: str | None = None
        """Of the last call; None: there is no call."""

    def read(self, text: str, *, is_end: bool) -> list[Piece]:
        """The pieces that these characters complete."""
        if self._parser is None:
            return [Content(text)] if text else []
        pieces = self._parser.feed(text) + (self._parser.finish() if is_end else [])
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._arguments = ""
            elif isinstance(piece, CallArguments):
                self._arguments = (self._arguments or "") + piece.text
        return pieces

    @property
    def is_inside_call(self) -> bool:
        """Whether the text so far ends inside a call."""
        return self._arguments is not None and not is_object(self._arguments, max_digits=None)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish reason for a text. reason: the engine's finish reason: "stop" also if a stop string cut off a call."""
        ends_with_calls = reason == "stop" and self._arguments is not None and not self.is_inside_call
        return "tool_calls" if ends_with_calls else reason


class ToolCallIndexer:
    """Numbers the calls of one text."""

    def __init__(self) -> None:
        self._index = -1

    def delta(self, piece: CallStart | CallArguments) -> ToolCallDelta:
        if isinstance(piece, CallArguments):
            return ToolCallDelta(index=self._index, function=FunctionDelta(arguments=piece.text))
        self._index += 1
        function = FunctionDelta(name=piece.name, arguments="")
        return ToolCallDelta(index=self._index, id=new_call_id(), type="function", function=function)


class ParsedText(NamedTuple):
    content: str
    calls: list[MessageFunctionCall]


def split_pieces(pieces: Sequence[Piece]) -> ParsedText:
    """All content, joined in order, and the calls."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[MessageFunctionCall] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append(MessageFunctionCall(name=piece.name, arguments=""))
        elif isinstance(piece, CallArguments):
            calls[-1].arguments += piece.text
    return ParsedText(content, calls)
