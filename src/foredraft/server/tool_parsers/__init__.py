"""Parsers that find tool calls in generated text. Each parser object parses one text.

A new format is one new file and one line in PARSERS.
"""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.server.tool_parsers.auto_parser import AutoToolParser
from foredraft.server.tool_parsers.forced_parsers import NAME, PARAMETERS, NamedParser, RequiredParser
from foredraft.server.tool_parsers.hermes import HermesParser
from foredraft.server.tool_parsers.llama3_json import Llama3JsonParser
from foredraft.server.tool_parsers.parsed_pieces import CallArguments, CallStart, Content, Piece, ToolParser

PARSERS: Mapping[str, type[AutoToolParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}

_SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    "llama3_json": (('"parameters":', '{"name": function name'), ()),
}
"""Strings that a chat template for this format contains, and strings that it does not contain, since other formats use the same
tags."""


def detect_parser(chat_template: str) -> str | None:
    """The name of the parser for the format that a chat template describes, if PARSERS has it."""
    for name, (present, absent) in _SIGNATURES.items():
        if all(text in chat_template for text in present) and not any(text in chat_template for text in absent):
            return name
    return None


__all__ = [
    "NAME",
    "PARAMETERS",
    "PARSERS",
    "AutoToolParser",
    "CallArguments",
    "CallStart",
    "Content",
    "NamedParser",
    "Piece",
    "RequiredParser",
    "ToolParser",
    "detect_parser",
]
