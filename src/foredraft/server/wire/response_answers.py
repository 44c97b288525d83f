"""What /v1/responses answers: a response whole, or the events by which it comes to be, in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from uuid import uuid4

from pydantic import Field

from foredraft.server.tool_parsers import Arguments, CallBegun, Content, Piece
from foredraft.server.wire.answers import Answers, Head, PromptTokensDetails, usage_of
from foredraft.server.wire.base import Answer, if_any
from foredraft.server.wire.calls import TextReader
from foredraft.server.wire.errors import ErrorDetail
from foredraft.server.wire.responses import ResponsesRequest
from foredraft.server.wire.tools import new_call_id
from foredraft.text.outputs import Delta, RequestOutput

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Answer):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputMessage(Answer):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class OutputCall(Answer):
    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(PromptTokensDetails):
    cache_write_tokens: int = 0


class OutputTokensDetails(Answer):
    reasoning_tokens: int = 0


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class ResponseError(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesResponse(Answer):
    """store is false and previous_response_id null: nothing is stored."""

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
    metrics: dict[str, Any] | None = if_any()


class ResponseEvent(Answer):
    """type says which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponsesResponse | None = if_any()
    output_index: int | None = if_any()
    content_index: int | None = if_any()
    item_id: str | None = if_any()
    item: OutputItem | None = if_any()
    part: OutputText | None = if_any()
    delta: str | None = if_any()
    text: str | None = if_any()
    name: str | None = if_any()
    arguments: str | None = if_any()
    logprobs: list[Any] | None = if_any()
    code: str | None = if_any()
    message: str | None = if_any()
    param: str | None = if_any()


class Responses(Answers):
    """The answer to one body. tool_form: in which the model calls tools, one of PARSERS, or None."""

    end = b""

    def __init__(self, body: ResponsesRequest, model: str, tool_form: str | None = None) -> None:
        super().__init__(body, Head(f"resp_{uuid4().hex}", model))
        self._body = body
        self._reader = TextReader(body.tool_use.parser(tool_form))
        self._items: list[OutputItem] = []
        self._num_events = 0

    def first(self) -> list[Answer]:
        begun = self._response("in_progress")
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def chunks(self, _: int, delta: Delta) -> list[Answer]:
        is_end = delta.finish_reason is not None
        pieces = self._reader.read(delta.text, is_end=is_end)
        found = [event for piece in pieces for event in self._take(piece)]
        return [*found, *self._close(_status_of(delta.finish_reason))] if is_end else found

    def last(self, outputs: Sequence[RequestOutput]) -> list[Answer]:
        response = self._finished(outputs)
        return [self._event(f"response.{response.status}", response=response)]

    def failed(self, error: ErrorDetail) -> list[Answer]:
        code, message = error.code or error.type, error.message
        response = self._response("failed").model_copy(update={"error": ResponseError(code=code, message=message)})
        return [
            self._event("error", code=code, message=message, param=error.param),
            self._event("response.failed", response=response),
        ]

    def event(self, chunk: Answer) -> bytes:
        assert isinstance(chunk, ResponseEvent)
        return f"event: {chunk.type}\n".encode() + super().event(chunk)

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
        ((text,),) = (output.outputs for output in outputs)
        for piece in self._reader.read(text.text, is_end=True):
            for _ in self._take(piece):
                pass
        for _ in self._close(_status_of(text.finish_reason)):
            pass
        return self._finished(outputs)

    def _tail(self, usage: Any, metrics: Any) -> Answer:
        raise AssertionError("the last event has both")

    def _take(self, piece: Piece) -> Iterator[Answer]:
        """What follows from one more piece of the text."""
        current = self._items[-1] if self._items else None
        if isinstance(piece, CallBegun):
            yield from self._close("completed")
            call = OutputCall(id=f"fc_{uuid4().hex}", call_id=new_call_id(), name=piece.name)
            yield self._begin(call)
        elif isinstance(piece, Arguments):
            assert isinstance(current, OutputCall)
            current.arguments += piece.text
            yield self._of_item("response.function_call_arguments.delta", current, delta=piece.text)
        else:
            yield from self._take_text(piece)

    def _take_text(self, piece: Content) -> Iterator[Answer]:
        current = self._items[-1] if self._items else None
        if not isinstance(current, OutputMessage):
            yield from self._close("completed")
            current = OutputMessage(id=f"msg_{uuid4().hex}")
            yield self._begin(current)
            current.content = [OutputText()]
            yield self._of_item("response.content_part.added", current, content_index=0, part=OutputText())
        current.content[0].text += piece.text
        yield self._of_item("response.output_text.delta", current, content_index=0, delta=piece.text, logprobs=[])

    def _begin(self, item: OutputItem) -> Answer:
        self._items.append(item)
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item.model_copy(deep=True))

    def _close(self, status: Status) -> Iterator[Answer]:
        """The end of the item that is written, if one is."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return
        item.status = status
        if isinstance(item, OutputCall):
            kind = "response.function_call_arguments.done"
            yield self._of_item(kind, item, name=item.name, arguments=item.arguments)
        else:
            (part,) = item.content
            yield self._of_item("response.output_text.done", item, content_index=0, text=part.text, logprobs=[])
            yield self._of_item("response.content_part.done", item, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, kind: str, item: OutputItem, **fields: Any) -> Answer:
        return self._event(kind, item_id=item.id, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Answer:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields)

    def _finished(self, outputs: Sequence[RequestOutput]) -> ResponsesResponse:
        usage = usage_of(outputs)
        status = _status_of(outputs[0].outputs[0].finish_reason)
        return self._response(status).model_copy(
            update={
                "completed_at": int(time.time()) if status == "completed" else None,
                "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                    output_tokens=usage.completion_tokens,
                    total_tokens=usage.total_tokens,
                ),
                "metrics": self._metrics(outputs),
            }
        )

    def _response(self, status: Status) -> ResponsesResponse:
        body = self._body
        use = body.tool_use
        shown_format = {"type": "text"} if body.text is None or body.text.format is None else _dump(body.text.format)
        return ResponsesResponse(
            id=self._head.id,
            created_at=self._head.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._head.model,
            output=list(self._items),
            parallel_tool_calls=use.parallel,
            safety_identifier=body.safety_identifier,
            temperature=body.temperature,
            text={"format": shown_format},
            tool_choice={"type": "function", "name": use.choice} if use.is_named else use.choice,
            tools=[_dump(one) for one in body.tools or ()],
            top_p=body.top_p,
            user=body.user,
        )


def _status_of(finish_reason: str | None) -> Literal["completed", "incomplete"]:
    return "incomplete" if finish_reason == "length" else "completed"


def _dump(asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = asked.model_dump(by_alias=True)
    return found
