"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes 2 Pro, Qwen 2.5 and 3, and others."""

from __future__ import annotations

from foredraft.server.tool_parsers.auto_parser import BLANKS, AutoToolParser, Opening

_OPEN = "<tool_call>"


class HermesParser(AutoToolParser):
    argument_keys = ("arguments",)
    closing = "</tool_call>"

    def find_opening(self, text: str) -> Opening | None:
        at = text.find(_OPEN)
        return None if at < 0 else Opening(len(text[:at].rstrip(BLANKS)), at + len(_OPEN))

    def num_pending(self, text: str) -> int:
        return partial_tag_length(text, _OPEN)


def partial_tag_length(text: str, tag: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a tag, with the blanks before them."""
    longest = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
    return len(text) - len(text[: len(text) - longest].rstrip(BLANKS))
