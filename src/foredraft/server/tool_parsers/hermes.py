"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro, Qwen 2.5 and 3, and others."""

from __future__ import annotations

from foredraft.server.tool_parsers.tentative import BLANKS, Opening, TentativeParser

_OPEN = "<tool_call>"


class HermesParser(TentativeParser):
    argument_keys = ("arguments",)
    closing = "</tool_call>"

    def opening(self, text: str) -> Opening | None:
        at = text.find(_OPEN)
        return None if at < 0 else Opening(len(text[:at].rstrip(BLANKS)), at + len(_OPEN))

    def num_waiting(self, text: str) -> int:
        return num_begun(text, _OPEN)


def num_begun(text: str, tag: str) -> int:
    """Characters at the end of a text that may be the beginning of a tag, with the blanks before them."""
    longest = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return len(text) - len(text[: len(text) - longest].rstrip(BLANKS))
