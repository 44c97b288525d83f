"""One body's answer, whole or as server-sent events; it ends with its client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.errors import ForedraftError, RequestError
from foredraft.server.auth import CLIENT
from foredraft.server.errors import ApiError, internal_error
from foredraft.server.logging import NOTE, REQUEST_ID, log, places
from foredraft.server.presence import until_gone
from foredraft.server.service import Service
from foredraft.server.wire.answers import RunningUsage
from foredraft.server.wire.base import Answer
from foredraft.server.wire.chat import ChatRequest
from foredraft.server.wire.completions import CompletionRequest
from foredraft.server.wire.errors import ErrorDetail
from foredraft.server.wire.responses import ResponsesRequest
from foredraft.text.outputs import Delta, RequestOutput
from foredraft.text.request import Request

_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Writer(Protocol):
    """Makes an answer, or its chunks. place: which of the requests a delta belongs to."""

    end: bytes

    def first(self) -> list[Answer]: ...

    def chunks(self, place: int, delta: Delta) -> list[Answer]: ...

    def last(self, outputs: Sequence[RequestOutput]) -> list[Answer]: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer: ...

    def failed(self, error: ErrorDetail) -> list[Answer]: ...

    def event(self, chunk: Answer) -> bytes: ...


class Reply(Response):
    """Prepares a body's requests, runs them and sends what they write.

    A client that goes away, and a server that is told to stop, end the requests before the engine's next step. Before the
    answer has begun errors are raised (ApiError); afterwards they are its last event.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest | ChatRequest | ResponsesRequest,
        make_writer: Callable[[list[Request]], Writer],
        scope: MutableMapping[str, Any],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers=headers, media_type="text/event-stream" if body.stream else "application/json")
        del self.headers["content-length"]  # it is not known yet
        self._service = service
        self._body = body
        self._make_writer = make_writer
        self._writer: Writer | None = None
        self._note: dict[str, Any] = scope.get(NOTE, {})
        self._client: str = scope.get(CLIENT, "")
        self._request_id: str | None = scope.get(REQUEST_ID)
        self._timer = service.metrics.timer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_done = work.done()
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
        if is_done:
            work.result()
        else:
            self._timer.aborted("disconnect")
            self._note["ended"] = "the client went away"

    async def _work(self, send: Send) -> None:
        has_begun = False

        async def begin() -> None:
            nonlocal has_begun
            has_begun = True
            headers = [*_STREAM_HEADERS, *self.raw_headers] if self._body.stream else self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})

        try:
            async with asyncio.timeout(self._service.settings.limits.request_seconds):
                await self._write(begin, send)
        except Exception as error:
            found = self._as_api_error(error)
            self._note["error"] = found.code or found.status_code
            if not has_begun:
                raise found from error
            assert self._writer is not None  # a stream begins with it
            events = map(self._writer.event, self._writer.failed(found.error))
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": False})

    async def _write(self, begin: Callable[[], Awaitable[None]], send: Send) -> None:
        service, body = self._service, self._body
        num_prompts = len(body.prompts) if isinstance(body, CompletionRequest) else 1
        with service.admitted(num_prompts * body.num_texts, self._client):
            requests = await service.prompts.requests(body, client=self._client, request_id=self._request_id)
            writer = self._writer = self._make_writer(requests)
            self._say(requests)
            async with aclosing(service.engine.follow(requests)) as batches:
                if body.stream:
                    await begin()
                    usage = RunningUsage(requests) if body.repeats_usage else None
                    outputs = await self._stream(batches, writer, usage, send)
                    rest = b"".join(map(writer.event, writer.last(outputs))) + writer.end
                else:
                    outputs = await self._collect(batches)
                    rest = writer.whole(outputs).model_dump_json().encode()
        self._timer.finished(outputs)
        texts = [text for output in outputs for text in output.outputs]
        self._note["completion_tokens"] = sum(len(text.token_ids) for text in texts)
        if self._service.settings.log_prompts:
            self._note["texts"] = [text.text for text in texts]
        if not body.stream:
            self.headers["content-length"] = str(len(rest))
            await begin()
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    def _say(self, requests: list[Request]) -> None:
        """What the log tells of a request."""
        body = self._body
        self._note["prompt_tokens"] = sum(len(request.prompt_ids) for request in requests)
        for name in ("user", "safety_identifier"):
            if getattr(body, name, None) is not None:
                self._note[name] = getattr(body, name)
        if self._service.settings.log_prompts:
            self._note["prompts"] = [request.prompt_text for request in requests]

    async def _stream(
        self,
        batches: AsyncGenerator[list[tuple[int, Delta]], None],
        writer: Writer,
        usage: RunningUsage | None,
        send: Send,
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        if first := writer.first():
            await send({"type": "http.response.body", "body": b"".join(map(writer.event, first)), "more_body": True})
        async for batch in batches:
            self._take(batch, outputs)
            events: list[bytes] = []
            for place, delta in batch:
                chunks = writer.chunks(place, delta)
                if usage is not None:
                    usage.take(delta)
                    chunks = usage.on(chunks)
                events += map(writer.event, chunks)
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        return [outputs[place] for place in sorted(outputs)]

    async def _collect(self, batches: AsyncGenerator[list[tuple[int, Delta]], None]) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        async for batch in batches:
            self._take(batch, outputs)
        return [outputs[place] for place in sorted(outputs)]

    def _take(self, batch: list[tuple[int, Delta]], outputs: dict[int, RequestOutput]) -> None:
        self._timer.delivered(batch)
        outputs.update((place, delta.output) for place, delta in batch if delta.output is not None)

    def _as_api_error(self, error: Exception) -> ApiError:
        limit = self._service.settings.limits.request_seconds
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TimeoutError):
            self._timer.aborted("timeout")
            return ApiError(408, f"the request took more than {limit:g} seconds", code="timeout")
        if isinstance(error, ForedraftError) and not isinstance(error, RequestError) and self._service.is_draining:
            self._timer.aborted("shutdown")
            return ApiError(503, "the server is shutting down", code="unavailable", headers={"Retry-After": "5"})
        self._timer.aborted("error")
        if isinstance(error, RequestError) and not _is_internal(error):
            reason = ForedraftError(str(error).partition(": ")[2])  # the engine's number means nothing out there
            return ApiError(400, str(reason), param=self._body.blamed(reason), code="request_failed")
        cause = error.__cause__ or error
        log("failed", logging.ERROR, error=type(cause).__name__, at=places(cause.__traceback__))
        return internal_error()


def _is_internal(error: RequestError) -> bool:
    """Whether an exception ended the request that no field of it explains."""
    return error.__cause__ is not None and not isinstance(error.__cause__, ForedraftError)
