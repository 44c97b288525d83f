"""The engine for asyncio: one thread owns it, coroutines speak to that thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from foredraft.errors import ForedraftError, RequestError
from foredraft.llm import LLM
from foredraft.outputs import Delta, RequestOutput
from foredraft.request import Prompt, Request
from foredraft.sampling import SamplingParams

Deliver = Callable[[Delta | Exception], None]


class AsyncLLM:
    """As LLM, for many concurrent coroutines. Takes the same arguments, or an LLM, which it then owns.

    Use as `async with AsyncLLM(...) as llm`, or call `shutdown()` at the end.
    """

    def __init__(self, *args: Any, llm: LLM | None = None, **settings: Any) -> None:
        self.llm = llm or LLM(*args, **settings)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[Request, Deliver] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._own_engine, name="foredraft-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """End every running request and the thread. Harmless when repeated."""
        self._is_closed = True
        self._calls.put(None)
        self._thread.join()

    async def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """Deltas as they are written. Leaving the loop, or cancelling the task, ends the request.

        Raises ForedraftError for what cannot be honoured, RequestError if the request fails on the way.
        """
        if self._is_closed:
            raise ForedraftError("this AsyncLLM was shut down: make a new one")
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        request = self.llm.frontend.prepare(prompt, sampling_params)

        def deliver(item: Delta | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        self._calls.put(lambda: self._start(request, deliver))
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            self._calls.put(lambda: self._end(request))

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput:
        """The whole request. Many at once share the engine's batch: `asyncio.gather` them."""
        async for delta in self.stream(prompt, sampling_params):
            if delta.output is not None:
                return delta.output
        raise RequestError("the request ended without an output")

    def _own_engine(self) -> None:
        while True:
            call = self._next_call()
            while call is not _NOTHING:
                if call is None:
                    self._run_what_is_left()
                    self._close(ForedraftError("the engine was shut down"))
                    return
                call()
                call = self._next_call()
            try:
                self.llm.engine.step()
            except Exception as error:
                self._close(error)
            for request in list(self._running):
                self._deliver(request)

    def _next_call(self) -> Callable[[], None] | None:
        """Waits only when there is nothing to step."""
        try:
            return self._calls.get(block=not self.llm.engine.has_work)
        except queue.Empty:
            return _NOTHING

    def _run_what_is_left(self) -> None:
        """Requests that came while the engine was being shut down: they are told so like the others."""
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None:
                call()

    def _start(self, request: Request, deliver: Deliver) -> None:
        self._running[request] = deliver
        try:
            self.llm.frontend.start(request)
        except Exception as error:  # whatever it is, it is this request's own
            self._end(request)
            deliver(error)

    def _end(self, request: Request) -> None:
        self._running.pop(request, None)
        self.llm.frontend.abort(request)

    def _deliver(self, request: Request) -> None:
        deliver = self._running[request]
        if request.is_finished:
            del self._running[request]
        if request.is_finished and request.error:
            deliver(RequestError(f"request {request.request_id}: {request.error}", [request.output()]))
            return
        for delta in request.deltas():
            deliver(delta)

    def _close(self, error: Exception) -> None:
        for request, deliver in list(self._running.items()):
            self._end(request)
            deliver(error)


def _NOTHING() -> None:
    """Stands for an empty queue."""
