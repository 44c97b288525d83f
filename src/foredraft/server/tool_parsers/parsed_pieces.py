"""The pieces that a parser splits a text into."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text outside of calls."""

    text: str


class CallStart(NamedTuple):
    """The start of a call of the tool; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the last call's arguments: JSON text."""

    text: str


Piece = Content | CallStart | CallArguments


class ToolParser(Protocol):
    """Parses one text while it is generated. The merged pieces do not depend on how the text was split."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The remaining pieces, at the end of the text."""


def merge_adjacent(pieces: list[Piece]) -> list[Piece]:
    """Merges adjacent pieces of the same type, and drops empty ones."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, CallStart):
            merged.append(piece)
        elif isinstance(piece, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            merged[-1] = CallArguments(last.text + piece.text)
        elif piece.text:
            merged.append(piece)
    return merged
