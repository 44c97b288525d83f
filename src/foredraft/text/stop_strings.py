"""Finds the first of several stop strings that completes in a text which arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from foredraft.text.detokenizer import common_prefix_len


class StopStrings:
    """Finds stop strings, even those that span several pieces. A call costs O(piece), however long the text is.

    The text of a step is a piece, which is final, and a tail after it, which the next tokens may change
    (`IncrementalDecoder.tail`).
    """

    __slots__ = ("_pattern", "_reach", "_recent", "_tail", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(sorted(set(strings), key=len))
        self._pattern = re.compile("|".join(map(re.escape, self.strings)))
        self._reach = max(map(len, self.strings), default=1) - 1
        self._recent = ""  # the last _reach characters of the final text
        self._tail = ""

    def __bool__(self) -> bool:
        return bool(self.strings)

    def find(self, piece: str, tail: str) -> tuple[int, str] | None:
        """The stop string that completes first in piece + tail, the one that begins first if several do.

        -> where it begins, relative to the piece (below 0: in the text before it), and which one it is
        """
        fresh = piece + tail
        num_searched = common_prefix_len(self._tail, fresh)  # these characters were the tail before
        if num_searched == len(fresh):
            return None
        text = self._recent + fresh
        if self._pattern.search(text) is None:  # nearly always
            return None
        searched_end = len(self._recent) + num_searched
        hits = [(text.find(stop, max(0, searched_end + 1 - len(stop))), stop) for stop in self.strings]
        begin, stop = min([hit for hit in hits if hit[0] >= 0], key=lambda hit: hit[0], default=(-1, ""))
        return (begin - len(self._recent), stop) if stop else None

    def advance(self, piece: str, tail: str) -> None:
        """Continue after this piece; `find` then looks for strings that complete later."""
        self._tail = tail
        if self._reach:
            self._recent = (self._recent + piece)[-self._reach :]

    def num_ambiguous(self, text: str) -> int:
        """How many characters at the end of text may be the beginning of a stop string."""
        for length in range(min(self._reach, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self.strings):
                return length
        return 0
