"""From what a model writes to the tools that it calls. Pure: no model, no socket; each parser takes apart one text.

A new form is one new file and one line in PARSERS.
"""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.server.tool_parsers.forced import NAME, PARAMETERS, NamedParser, RequiredParser
from foredraft.server.tool_parsers.hermes import HermesParser
from foredraft.server.tool_parsers.llama3_json import Llama3JsonParser
from foredraft.server.tool_parsers.pieces import Arguments, CallBegun, Content, Piece, ToolParser
from foredraft.server.tool_parsers.tentative import TentativeParser

PARSERS: Mapping[str, type[TentativeParser]] = {"hermes": HermesParser, "llama3_json": Llama3JsonParser}

_SIGNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>", "arguments"), ("<function=", "<arg_key>")),
    "llama3_json": (('"parameters":', '{"name": function name'), ()),
}
"""What a chat template that shows this form holds, and what it does not: others use the same tags around another form."""


def parser_of(chat_template: str) -> str | None:
    """The form that a chat template shows to its model, if it is one of PARSERS."""
    for name, (has, has_not) in _SIGNS.items():
        if all(sign in chat_template for sign in has) and not any(sign in chat_template for sign in has_not):
            return name
    return None


__all__ = [
    "NAME",
    "PARAMETERS",
    "PARSERS",
    "Arguments",
    "CallBegun",
    "Content",
    "NamedParser",
    "Piece",
    "RequiredParser",
    "TentativeParser",
    "ToolParser",
    "parser_of",
]
