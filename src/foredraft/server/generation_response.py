"""The response to one body: runs its requests and sends what they generate, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.errors import ForedraftError, RequestError
from foredraft.server.api_errors import ApiError, internal_error, shutting_down
from foredraft.server.auth import CLIENT
from foredraft.server.disconnect import wait_for_disconnect
from foredraft.server.request_log import LOG_FIELDS, REQUEST_ID, log_event, traceback_locations
from foredraft.server.service import Service
from foredraft.server.wire.chat_request import ChatRequest
from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.response_builder import ResponseBuilder
from foredraft.server.wire.responses_request import ResponsesRequest
from foredraft.server.wire.usage import RunningUsage
from foredraft.text.outputs import Delta, RequestOutput
from foredraft.text.request import Request

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class GenerationResponse(Response):
    """Prepares the requests of a body, runs them and sends their texts.

    When the client disconnects or the server stops, the requests are aborted before the engine's next step. An error before the
    response has started is raised as ApiError; a later one becomes the last event of the stream.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest | ResponsesRequest,
        make_builder: Callable[[list[Request]], ResponseBuilder],
        scope: MutableMapping[str, Any],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream" if body.stream else "application/json")
        del self.headers["content-length"]  # it is not known yet
        self._service = service
        self._body = body
        self._make_builder = make_builder
        self._builder: ResponseBuilder | None = None
        self._log_fields: dict[str, Any] = scope.get(LOG_FIELDS, {})
        self._client: str = scope.get(CLIENT, "")
        self._request_id: str | None = scope.get(REQUEST_ID)
        self._timer = service.metrics.timer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_done = work.done()
            for task in (work, disconnect):
                task.cancel()
            await asyncio.wait((work, disconnect))
        if is_done:
            work.result()
        else:
            self._timer.aborted("disconnect")
            self._log_fields["ended"] = "the client disconnected"

    async def _run(self, send: Send) -> None:
        has_started = False

        async def start() -> None:
            nonlocal has_started
            has_started = True
            headers = [*_STREAM_HEADERS, *self.raw_headers] if self._body.stream else self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})

        try:
            async with asyncio.timeout(self._service.settings.limits.request_seconds):
                await self._generate(start, send)
        except Exception as error:
            api_error = self._as_api_error(error)
            self._log_fields["error"] = api_error.code or api_error.status_code
            if not has_started:
                raise api_error from error
            assert self._builder is not None  # it was made before the stream started
            events = map(self._builder.encode_event, self._builder.error_chunks(api_error.error))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": False})

    async def _generate(self, start: Callable[[], Awaitable[None]], send: Send) -> None:
        service, body = self._service, self._body
        num_prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        with service.admitted(num_prompts * body.num_texts, self._client):
            requests = await service.prompt_processor.prepare(body, client=self._client, request_id=self._request_id)
            builder = self._builder = self._make_builder(requests)
            self._log_request(requests)
            async with aclosing(service.engine.follow(requests)) as batches:
                if body.stream:
                    await start()
                    usage = RunningUsage(requests) if body.repeats_usage else None
                    outputs = await self._stream(batches, builder, usage, send)
                    rest = b"".join(map(builder.encode_event, builder.last_chunks(outputs))) + builder.end
                else:
                    outputs = await self._collect(batches)
                    rest = builder.response(outputs).model_dump_json().encode()
        self._timer.finished(outputs)
        self._log_outputs(outputs)
        if not body.stream:
            self.headers["content-length"] = str(len(rest))
            await start()
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    def _log_outputs(self, outputs: list[RequestOutput]) -> None:
        texts = [text for output in outputs for text in output.outputs]
        self._log_fields["completion_tokens"] = sum(len(text.token_ids) for text in texts)
        if self._service.settings.log_prompts:
            self._log_fields["texts"] = [text.text for text in texts]

    def _log_request(self, requests: list[Request]) -> None:
        body = self._body
        self._log_fields["prompt_tokens"] = sum(len(request.prompt_ids) for request in requests)
        for name in ("user", "safety_identifier"):
            if getattr(body, name, None) is not None:
                self._log_fields[name] = getattr(body, name)
        if self._service.settings.log_prompts:
            self._log_fields["prompts"] = [request.prompt_text for request in requests]

    async def _stream(
        self,
        batches: AsyncGenerator[list[tuple[int, Delta]], None],
        builder: ResponseBuilder,
        usage: RunningUsage | None,
        send: Send,
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        if first := builder.first_chunks():
            events = b"".join(map(builder.encode_event, first))
            await send({"type": "http.response.body", "body": events, "more_body": True})
        async for batch in batches:
            self._receive(batch, outputs)
            events = b"".join(_events(batch, builder, usage))
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        return [outputs[index] for index in sorted(outputs)]

    async def _collect(self, batches: AsyncGenerator[list[tuple[int, Delta]], None]) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        async for batch in batches:
            self._receive(batch, outputs)
        return [outputs[index] for index in sorted(outputs)]

    def _receive(self, batch: list[tuple[int, Delta]], outputs: dict[int, RequestOutput]) -> None:
        self._timer.delivered(batch)
        outputs.update((index, delta.output) for index, delta in batch if delta.output is not None)

    def _as_api_error(self, error: Exception) -> ApiError:
        limit = self._service.settings.limits.request_seconds
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TimeoutError):
            self._timer.aborted("timeout")
            return ApiError(408, f"the request took more than {limit:g} seconds", code="timeout")
        if isinstance(error, ForedraftError) and not isinstance(error, RequestError) and self._service.is_draining:
            self._timer.aborted("shutdown")
            return shutting_down()
        self._timer.aborted("error")
        if isinstance(error, RequestError) and not _is_internal(error):
            reason = ForedraftError(
                str(error).partition(": ")[2]
            )  # without the number that the engine gave the request
            return ApiError(400, str(reason), param=self._body.error_field(reason), code="request_failed")
        cause = error.__cause__ or error
        log_event("failed", logging.ERROR, error=type(cause).__name__, at=traceback_locations(cause.__traceback__))
        return internal_error()


def _events(batch: list[tuple[int, Delta]], builder: ResponseBuilder, usage: RunningUsage | None) -> Iterator[bytes]:
    for index, delta in batch:
        chunks = builder.chunks(index, delta)
        if usage is not None:
            usage.add(delta)
            chunks = usage.attach(chunks)
        yield from map(builder.encode_event, chunks)


def _is_internal(error: RequestError) -> bool:
    """Whether the request was ended by an exception that is not its own fault."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ForedraftError)
