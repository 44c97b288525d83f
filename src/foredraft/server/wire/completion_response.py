"""The response of /v1/completions and its chunks."""

from __future__ import annotations

from typing import Any, Literal

from foredraft.server.wire.models import ResponseModel, omit_if_none
from foredraft.server.wire.token_logprobs import PromptLogprobs
from foredraft.server.wire.usage import Usage


class CompletionLogprobs(ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """stop_reason: the stop string or stop token id that ended the text. token_ids: only if return_token_ids is true."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = omit_if_none()
    token_ids: list[int] | None = omit_if_none()
    prompt_token_ids: list[int] | None = omit_if_none()


class CompletionResponse(ResponseModel):
    """Also a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = omit_if_none()
