"""Find places where a text can be cut so that encoding its parts gives the same ids as encoding the whole."""

from __future__ import annotations

_SPACE, _NEWLINE = 0x20, 0x0A
_WHITE = frozenset(b" \t\r\n\x0b\x0c")
_FARTHEST = 256
"""Bytes. Scripts without spaces have no borders: there a text is cut anywhere rather than encoded from its beginning."""


def last_border(text: bytes | bytearray, first: int, last: int) -> int:
    """The last border from `first` to `last`, where ids are known up to `last`. A border is before a space that follows a word, or after
    a line break that a word follows. Pre-tokenizers cut there, and vocabularies without a pre-tokenizer have no tokens across it. Without
    a border nearby: `first`, or `last` if `first` is far away."""
    for place in range(min(last, len(text) - 1), max(first, last - _FARTHEST), -1):
        before, behind = text[place - 1], text[place]
        ends_word = behind == _SPACE and before not in _WHITE
        # how white space is cut depends on what follows it, which was not yet known at `last`
        ends_line = before == _NEWLINE and behind not in _WHITE and place < last
        if ends_word or ends_line:
            return place
    return last if last - first > _FARTHEST else first
