"""What a parser makes of a text, piece by piece."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text that is no call."""

    text: str


class CallBegun(NamedTuple):
    """A call of this tool; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """More of the last call's arguments: JSON text."""

    text: str


Piece = Content | CallBegun | Arguments


class ToolParser(Protocol):
    """Takes one text apart as it is written. The pieces, put together, do not depend on where the text was cut."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The rest, once no text follows."""


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind put together, and empty ones left out."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, CallBegun):
            found.append(piece)
        elif isinstance(piece, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(last.text + piece.text)
        elif piece.text:
            found.append(piece)
    return found
