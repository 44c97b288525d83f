"""The response of /v1/responses and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from foredraft.server.wire.error_body import ErrorDetail
from foredraft.server.wire.models import ResponseModel, omit_if_none
from foredraft.server.wire.usage import PromptTokensDetails

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(ResponseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(ResponseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class OutputCall(ResponseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int = 0


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int = 0


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseError(ResponseModel):
    code: str
    message: str


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesResponse(ResponseModel):
    """store is always false and previous_response_id always null: nothing is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: None = None
    safety_identifier: str | None
    store: Literal[False] = False
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metrics: dict[str, Any] | None = omit_if_none()


class ResponseEvent(ResponseModel):
    """Which of the optional fields are present depends on type."""

    type: str
    sequence_number: int
    response: ResponsesResponse | None = omit_if_none()
    output_index: int | None = omit_if_none()
    content_index: int | None = omit_if_none()
    item_id: str | None = omit_if_none()
    item: OutputItem | None = omit_if_none()
    part: OutputText | None = omit_if_none()
    delta: str | None = omit_if_none()
    text: str | None = omit_if_none()
    name: str | None = omit_if_none()
    arguments: str | None = omit_if_none()
    logprobs: list[Any] | None = omit_if_none()
    code: str | None = omit_if_none()
    message: str | None = omit_if_none()
    param: str | None = omit_if_none()

    def encode(self) -> bytes:
        """The event as a server-sent one."""
        return f"event: {self.type}\ndata: {self.model_dump_json()}\n\n".encode()


class ErrorEvent(ResponseEvent):
    """param is always present, as in OpenAI's API."""

    type: Literal["error"] = "error"
    param: str | None = None


def failure_events(response: ResponsesResponse, error: ErrorDetail, num_events: int) -> list[ResponseEvent]:
    """The last events of a stream that failed. response: as far as it got. num_events: those before."""
    code, message = error.code or error.type, error.message
    failure = {"status": "failed", "error": ResponseError(code=code, message=message)}
    return [
        ErrorEvent(sequence_number=num_events, code=code, message=message, param=error.param),
        ResponseEvent(
            type="response.failed", sequence_number=num_events + 1, response=response.model_copy(update=failure)
        ),
    ]
