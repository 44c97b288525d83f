"""The consoles for standard output and standard error, and functions that write to them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console

# control characters, which a terminal would execute rather than show: a model may write anything
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    0x7F: 0x2421,
    **dict.fromkeys(range(128, 160), 65533),
}
_PIPE_WIDTH = 200


def output_console() -> Console:
    """For the result. Lines are not wrapped: a pipe gets them whole."""
    return Console(file=sys.stdout, width=_width(sys.stdout), highlight=False, soft_wrap=True)


def error_console() -> Console:
    """For everything that is not the result itself."""
    return Console(file=sys.stderr, width=_width(sys.stderr), highlight=False, soft_wrap=True)


def _width(stream: TextIO) -> int | None:
    """None: the terminal's own. A pipe has none: make it wide enough for the tables."""
    return None if stream.isatty() else _PIPE_WIDTH


def has_colours(console: Console) -> bool:
    return console.is_terminal and console.color_system is not None and not console.no_color


def visible(text: str) -> str:
    """The text with symbols instead of control characters."""
    return text.translate(_CONTROLS)


def write_text(console: Console, text: str) -> None:
    """Write text without colours, safe for a terminal, and flush."""
    console.file.write(visible(text) if console.is_terminal else text)
    console.file.flush()


def write_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.out(line, highlight=False)
