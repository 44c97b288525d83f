"""Finds out how the served model writes tool calls."""

from __future__ import annotations

from foredraft.llm import LLM
from foredraft.server.request_log import log_event
from foredraft.server.server_settings import AUTO, NONE, ServerSettings
from foredraft.server.tool_parsers import detect_parser


def detect_tool_call_parser(settings: ServerSettings, llm: LLM) -> str | None:
    """The name of the parser, from the settings or detected from the chat template; None: calls stay text. Logs the choice."""
    setting = settings.tool_call_parser
    parser = detect_parser(_template(settings, llm)) if setting == AUTO else None if setting == NONE else setting
    log_event("tool_calls", parser=parser or NONE, by="chat template" if setting == AUTO else "--tool-call-parser")
    return parser


def _template(settings: ServerSettings, llm: LLM) -> str:
    """The chat template; all of them together if the checkpoint has several."""
    template = settings.chat_template or getattr(llm.tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(template.values())
