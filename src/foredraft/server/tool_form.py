"""In which form the model that is served calls tools."""

from __future__ import annotations

from foredraft.llm import LLM
from foredraft.server.logging import log
from foredraft.server.settings import AUTO, NONE, ServerSettings
from foredraft.server.tool_parsers import parser_of


def tool_form_of(settings: ServerSettings, llm: LLM) -> str | None:
    """One of PARSERS, as it was given or as the chat template shows it; None: calls that the model makes stay text. Says which
    in the log."""
    given = settings.tool_call_parser
    found = parser_of(_template(settings, llm)) if given == AUTO else None if given == NONE else given
    log("tool_calls", parser=found or NONE, by="chat template" if given == AUTO else "--tool-call-parser")
    return found


def _template(settings: ServerSettings, llm: LLM) -> str:
    """A checkpoint may have several, one of them for tools."""
    found = settings.chat_template or getattr(llm.tokenizer, "chat_template", None) or ""
    return found if isinstance(found, str) else "\n".join(found.values())
