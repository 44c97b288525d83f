"""{"name": ..., "parameters": {...}}: Llama 3.1 and later. Several follow each other, with a semicolon between or without.

An object is a call where it stands at the text's beginning, behind another call, or behind <|python_tag|>; anywhere else it is
text, which may well show an object.
"""

from __future__ import annotations

import re

from foredraft.server.tool_parsers.hermes import num_begun
from foredraft.server.tool_parsers.tentative import BLANKS, Opening, TentativeParser

_TAG = "<|python_tag|>"
_FIRST = re.compile(rf"[{BLANKS}]*(?=\{{)")
_NEXT = re.compile(rf"[{BLANKS}]*;?[{BLANKS}]*(?=\{{)")
_BEGUN = re.compile(rf"[{BLANKS}]*;?[{BLANKS}]*")


class Llama3JsonParser(TentativeParser):
    argument_keys = ("parameters", "arguments")
    closing = ""

    _is_first = True

    def opening(self, text: str) -> Opening | None:
        pattern = _NEXT if self.is_beside_call else _FIRST if self._is_first else None
        bare = pattern.match(text) if pattern else None
        at = text.find(_TAG)
        if not bare and at < 0:
            return None
        self._is_first = False
        return Opening(0, bare.end()) if bare else Opening(len(text[:at].rstrip(BLANKS)), at + len(_TAG))

    def num_waiting(self, text: str) -> int:
        if self.is_beside_call and _BEGUN.fullmatch(text):
            return len(text)
        num_waiting = num_begun(text, _TAG)
        self._is_first = self._is_first and num_waiting == len(text) and not text.strip(BLANKS)
        return num_waiting
