"""{"name": ..., "parameters": {...}}: Llama 3.1 and later. Calls follow each other, with or without a semicolon between them.

An object is a call at the beginning of the text, after another call, or after <|python_tag|>. Anywhere else it is text.
"""

from __future__ import annotations

import re

from foredraft.server.tool_parsers.auto_parser import BLANKS, AutoToolParser, Opening
from foredraft.server.tool_parsers.hermes import partial_tag_length

_TAG = "<|python_tag|>"
_FIRST = re.compile(rf"[{BLANKS}]*(?=\{{)")
_NEXT = re.compile(rf"[{BLANKS}]*;?[{BLANKS}]*(?=\{{)")
_BEGUN = re.compile(rf"[{BLANKS}]*;?[{BLANKS}]*")


class Llama3JsonParser(AutoToolParser):
    argument_keys = ("parameters", "arguments")
    closing = ""

    _is_first = True

    def find_opening(self, text: str) -> Opening | None:
        pattern = _NEXT if self.is_beside_call else _FIRST if self._is_first else None
        bare = pattern.match(text) if pattern else None
        at = text.find(_TAG)
        if not bare and at < 0:
            return None
        self._is_first = False
        return Opening(0, bare.end()) if bare else Opening(len(text[:at].rstrip(BLANKS)), at + len(_TAG))

    def num_pending(self, text: str) -> int:
        if self.is_beside_call and _BEGUN.fullmatch(text):
            return len(text)
        num_pending = partial_tag_length(text, _TAG)
        self._is_first = self._is_first and num_pending == len(text) and not text.strip(BLANKS)
        return num_pending
