"""Builds the responses of /v1/responses: whole, or as the events of a stream in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from uuid import uuid4

from foredraft.server.tool_parsers import CallArguments, CallStart, Content, Piece
from foredraft.server.wire.error_body import ErrorDetail
from foredraft.server.wire.models import RequestModel, ResponseModel
from foredraft.server.wire.response_builder import ResponseBuilder, ResponseHead
from foredraft.server.wire.responses_request import ResponsesRequest
from foredraft.server.wire.responses_response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponsesResponse,
    ResponseUsage,
    Status,
    failure_events,
)
from foredraft.server.wire.tool_calls import ToolCallReader
from foredraft.server.wire.tool_use import new_call_id
from foredraft.server.wire.usage import usage_of
from foredraft.text.outputs import Delta, RequestOutput


class ResponsesBuilder(ResponseBuilder):
    """tool_call_parser: the name of the parser for calls that the model makes on its own; None leaves them as text."""

    end = b""

    def __init__(self, body: ResponsesRequest, model: str, tool_call_parser: str | None = None) -> None:
        super().__init__(body, ResponseHead(f"resp_{uuid4().hex}", model))
        self._body = body
        self._reader = ToolCallReader(body.tool_use.parser(tool_call_parser))
        self._items: list[OutputItem] = []
        self._num_events = 0

    def first_chunks(self) -> list[ResponseModel]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def chunks(self, _: int, delta: Delta) -> list[ResponseModel]:
        is_end = delta.finish_reason is not None
        pieces = self._reader.read(delta.text, is_end=is_end)
        events = [event for piece in pieces for event in self._take(piece)]
        return [*events, *self._close(self._final_status(delta.finish_reason))] if is_end else events

    def last_chunks(self, outputs: Sequence[RequestOutput]) -> list[ResponseModel]:
        response = self._finished(outputs)
        return [self._event(f"response.{response.status}", response=response)]

    def error_chunks(self, error: ErrorDetail) -> list[ResponseModel]:
        closing = list(self._close("incomplete"))
        return [*closing, *failure_events(self._response("in_progress"), error, self._num_events)]

    def encode_event(self, chunk: ResponseModel) -> bytes:
        assert isinstance(chunk, ResponseEvent)
        return chunk.encode()

    def response(self, outputs: Sequence[RequestOutput]) -> ResponseModel:
        ((text,),) = (output.outputs for output in outputs)
        for piece in self._reader.read(text.text, is_end=True):
            for _ in self._take(piece):
                pass
        for _ in self._close(self._final_status(text.finish_reason)):
            pass
        return self._finished(outputs)

    def _summary_chunk(self, usage: Any, metrics: Any) -> ResponseModel:
        raise AssertionError("the last event of this route has the usage and the metrics")

    def _take(self, piece: Piece) -> Iterator[ResponseModel]:
        """Add a piece of the text to the output items; yields the events for it."""
        current = self._items[-1] if self._items else None
        if isinstance(piece, CallStart):
            yield from self._close("completed")
            call = OutputCall(id=f"fc_{uuid4().hex}", call_id=new_call_id(), name=piece.name)
            yield self._begin(call)
        elif isinstance(piece, CallArguments):
            assert isinstance(current, OutputCall)
            current.arguments += piece.text
            yield self._item_event("response.function_call_arguments.delta", current, delta=piece.text)
        else:
            yield from self._take_text(piece)

    def _take_text(self, piece: Content) -> Iterator[ResponseModel]:
        current = self._items[-1] if self._items else None
        if not isinstance(current, OutputMessage):
            yield from self._close("completed")
            current = OutputMessage(id=f"msg_{uuid4().hex}")
            yield self._begin(current)
            current.content = [OutputText()]
            yield self._item_event("response.content_part.added", current, content_index=0, part=OutputText())
        current.content[0].text += piece.text
        yield self._item_event("response.output_text.delta", current, content_index=0, delta=piece.text, logprobs=[])

    def _begin(self, item: OutputItem) -> ResponseModel:
        self._items.append(item)
        index = len(self._items) - 1
        return self._event("response.output_item.added", output_index=index, item=item.model_copy(deep=True))

    def _close(self, status: Status) -> Iterator[ResponseModel]:
        """End the item that is in progress, if there is one; yields the events for it."""
        item = self._items[-1] if self._items else None
        if item is None or item.status != "in_progress":
            return
        item.status = status
        if isinstance(item, OutputCall):
            kind = "response.function_call_arguments.done"
            yield self._item_event(kind, item, name=item.name, arguments=item.arguments)
        else:
            (part,) = item.content
            yield self._item_event("response.output_text.done", item, content_index=0, text=part.text, logprobs=[])
            yield self._item_event("response.content_part.done", item, content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, item: OutputItem, **fields: Any) -> ResponseModel:
        return self._event(kind, item_id=item.id, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseModel:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields)

    def _finished(self, outputs: Sequence[RequestOutput]) -> ResponsesResponse:
        usage = usage_of(outputs)
        finish_reason = outputs[0].outputs[0].finish_reason
        status = self._final_status(finish_reason)
        return self._response(status).model_copy(
            update={
                "completed_at": int(time.time()) if status == "completed" else None,
                "incomplete_details": IncompleteDetails() if finish_reason == "length" else None,
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
                    output_tokens=usage.completion_tokens,
                    total_tokens=usage.total_tokens,
                ),
                "metrics": self._metrics(outputs),
            }
        )

    def _final_status(self, finish_reason: str | None) -> Literal["completed", "incomplete"]:
        """Of the whole text and of its last item. finish_reason: the engine's: "stop" also if a stop string cut off a call."""
        return "incomplete" if finish_reason == "length" or self._reader.is_inside_call else "completed"

    def _response(self, status: Status) -> ResponsesResponse:
        body = self._body
        use = body.tool_use
        text_format = {"type": "text"} if body.text is None or body.text.format is None else _dump(body.text.format)
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
            text={"format": text_format},
            tool_choice={"type": "function", "name": use.choice} if use.is_named else use.choice,
            tools=[_dump(tool) for tool in body.tools or ()],
            top_p=body.top_p,
            user=body.user,
        )


def _dump(model: RequestModel) -> dict[str, Any]:
    return model.model_dump(by_alias=True)
