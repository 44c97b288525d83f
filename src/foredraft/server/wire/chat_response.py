"""The response of /v1/chat/completions and its chunks."""

from __future__ import annotations

from typing import Any, Literal

from foredraft.server.wire.models import ResponseModel, omit_if_none
from foredraft.server.wire.token_logprobs import PromptLogprobs
from foredraft.server.wire.tool_calls import MessageToolCall, ToolCallDelta
from foredraft.server.wire.usage import Usage


class TopLogprob(ResponseModel):
    """bytes: UTF-8; of a part of a character its bytes, None if they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[TokenLogprob]


class ChatMessage(ResponseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[MessageToolCall] | None = omit_if_none()
    refusal: None = None


class ChatChoice(ResponseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omit_if_none()


class ChatResponse(ResponseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: dict[str, Any] | None = omit_if_none()
    prompt_logprobs: PromptLogprobs | None = omit_if_none()
    prompt_token_ids: list[int] | None = omit_if_none()


class ChatDelta(ResponseModel):
    role: Literal["assistant"] | None = omit_if_none()
    content: str | None = omit_if_none()
    tool_calls: list[ToolCallDelta] | None = omit_if_none()


class ChatChunkChoice(ResponseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omit_if_none()


class ChatChunk(ResponseModel):
    """prompt_token_ids: in the first chunk of each text, if return_token_ids is true."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = omit_if_none()
    prompt_token_ids: list[int] | None = omit_if_none()
