"""/tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from foredraft.server.wire.base import Answer, Wire, if_any
from foredraft.server.wire.chat import TemplateFields

_NULL = {"type": "null"}
_OF_PROMPT = ("add_special_tokens",)
_OF_MESSAGES = tuple(sorted(TemplateFields.model_fields.keys() - {"messages"}))
_ONE_OF_THEM: dict[str, Any] = {
    "oneOf": [
        {
            "required": [name],
            "properties": {name: {"not": _NULL}, **dict.fromkeys((other, *not_with), _NULL)},
        }
        for name, other, not_with in (("prompt", "messages", _OF_MESSAGES), ("messages", "prompt", _OF_PROMPT))
    ]
}


class TokenizeRequest(TemplateFields):
    """A prompt, or messages under the chat template."""

    model_config = ConfigDict(json_schema_extra=_ONE_OF_THEM)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt. Default: true.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        if self.prompt is not None and any(getattr(self, name) is not None for name in _OF_MESSAGES):
            raise ValueError(f"{', '.join(_OF_MESSAGES)} go with messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens goes with a prompt: a chat template writes its own")
        return self


class TokenizeResponse(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = if_any()


class DetokenizeRequest(Wire):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class DetokenizeResponse(Answer):
    prompt: str
