"""Requests and responses of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from foredraft.server.wire.chat_request import TemplateFields
from foredraft.server.wire.models import RequestModel, ResponseModel, omit_if_none

_NULL = {"type": "null"}
_PROMPT_FIELDS = ("add_special_tokens",)
_MESSAGE_FIELDS = tuple(sorted(TemplateFields.model_fields.keys() - {"messages"}))
_PROMPT_OR_MESSAGES: dict[str, Any] = {
    "oneOf": [
        {
            "required": [name],
            "properties": {name: {"not": _NULL}, **dict.fromkeys((other, *excluded), _NULL)},
        }
        for name, other, excluded in (("prompt", "messages", _MESSAGE_FIELDS), ("messages", "prompt", _PROMPT_FIELDS))
    ]
}


class TokenizeRequest(TemplateFields):
    """Either a prompt, or messages that the chat template renders."""

    model_config = ConfigDict(json_schema_extra=_PROMPT_OR_MESSAGES)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(None, description="For a prompt only. Default: true.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and any(getattr(self, name) is not None for name in _MESSAGE_FIELDS):
            raise ValueError(f"{', '.join(_MESSAGE_FIELDS)} are for messages, not for a prompt")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens is for a prompt: a chat template adds its own special tokens")
        return self


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = omit_if_none()


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class DetokenizeResponse(ResponseModel):
    prompt: str
