"""The engine for asyncio: one thread owns it, coroutines speak to that thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from foredraft.errors import ForedraftError, RequestError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.outputs import Delta, RequestOutput
from foredraft.text.request import Prompt, Request

_NUM_COMPILING = 8  # more than are compiled at once: those that wait for one grammar are in them too
_CLOSED = "this AsyncLLM was shut down: make a new one"


class AsyncLLM:
    """As LLM, for many concurrent coroutines. Takes the same arguments, or an LLM, which it then owns.

    Use as `async with AsyncLLM(...) as llm`, or call `shutdown()` at the end.
    """

    def __init__(self, *args: Any, llm: LLM | None = None, **settings: Any) -> None:
        self.llm = llm or LLM(*args, **settings)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[Request, _Place] = {}
        self._mail: list[tuple[_Inbox, _Item]] = []
        self._failures: dict[Request, Exception] = {}
        self._gate = threading.Lock()  # after the thread's last call no other is put
        self._is_closed = False
        # of its own: threads that wait for grammars must not be missing where prompts are read
        self._compiling = ThreadPoolExecutor(_NUM_COMPILING, "foredraft-grammar")
        self._thread = threading.Thread(target=self._own_engine, name="foredraft-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._is_closed

    def shutdown(self) -> None:
        """End every running request and the thread. Harmless when repeated."""
        with self._gate:
            self._is_closed = True
            self._calls.put(None)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, client: str = "", priority: int = 0
    ) -> AsyncIterator[Delta]:
        """Deltas as they are written. Leaving the loop, or cancelling the task, ends the request. client, priority: see
        prepare.

        Raises ForedraftError for what cannot be honoured, RequestError if the request fails on the way.
        """
        self._require_open()
        request = await self.prepare(prompt, sampling_params, client=client, priority=priority)
        async with contextlib.aclosing(self.follow([request])) as batches:
            async for batch in batches:
                for _, delta in batch:
                    yield delta

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, client: str = "", priority: int = 0
    ) -> RequestOutput:
        """The whole request. Many at once share the engine's batch: `asyncio.gather` them. client, priority: see prepare."""
        async for delta in self.stream(prompt, sampling_params, client=client, priority=priority):
            if delta.output is not None:
                return delta.output
        raise RequestError("the request ended without an output")

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        client: str = "",
        priority: int = 0,
        request_id: str | None = None,
    ) -> Request:
        """A request that can be followed; it is checked and tokenised in a thread of its own, where a long prompt keeps
        nobody waiting, and a grammar that must be compiled keeps others of that kind waiting at most. Clients are served fairly;
        priority (the lower, the earlier) orders the requests of one of them. Raises ForedraftError for what cannot be
        honoured."""
        frontend, compiling = self.llm.frontend, None
        if sampling_params is not None and await asyncio.to_thread(frontend.must_compile, sampling_params):
            self._require_open()
            compiling = self._compiling
        prepare = partial(
            frontend.prepare, prompt, sampling_params, client=client, priority=priority, request_id=request_id
        )
        return await asyncio.get_running_loop().run_in_executor(compiling, prepare)

    async def follow(self, requests: Sequence[Request]) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Run prepared requests: what is new of them, each delta with its request's place, until all are complete.

        What came while nobody was reading comes together. Closing the iterator, or cancelling the task, ends them all
        before the next step. Raises RequestError if one fails, ForedraftError after a shutdown; the others end with it.
        """
        inbox = _Inbox(asyncio.get_running_loop())
        num_open = len(requests)
        self._put(lambda: self._start(requests, inbox))
        try:
            while num_open:
                batch = await inbox.take()
                failed = next((item for _, item in batch if isinstance(item, Exception)), None)
                if failed is not None:
                    raise failed
                deltas = [(place, item) for place, item in batch if isinstance(item, Delta)]
                num_open -= sum(delta.output is not None for _, delta in deltas)
                yield deltas
        finally:
            with contextlib.suppress(ForedraftError):  # after a shutdown nothing runs
                self._put(lambda: self._end(requests))

    def _require_open(self) -> None:
        if self._is_closed:
            raise ForedraftError(_CLOSED)

    def _put(self, call: Callable[[], None]) -> None:
        with self._gate:
            self._require_open()
            self._calls.put(call)

    def _own_engine(self) -> None:
        try:
            while self._run_calls():
                self._step()
                self._send()
        finally:
            with self._gate:
                self._is_closed = True
            self._run_what_is_left()
            self._close(ForedraftError("the engine was shut down"))
            self._send()

    def _run_calls(self) -> bool:
        """Do what was asked for meanwhile; waits only when there is nothing to step. False: it is time to end."""
        while True:
            try:
                call = self._calls.get(block=not self.llm.engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            self._send()

    def _step(self) -> None:
        """Where the device computes by itself, what a step gave is posted while it is busy with the next."""
        runs_ahead = self.llm.target.runs_ahead
        try:
            self.llm.engine.step(self._post_all if runs_ahead else None)
        except Exception as error:
            self._close(error)
        if not (runs_ahead and self.llm.engine.has_work):
            self._post_all()
        failures, self._failures = self._failures, {}
        for request, failure in failures.items():
            if request in self._running:  # and did not end with the engine
                self._fail(request, failure)

    def _post_all(self) -> None:
        """May come in the middle of a step, where nothing can be ended: who fails is noted."""
        for request in list(self._running):
            try:
                self._post(request)
            except Exception as error:  # its text could not be made: that is nobody else's affair
                self._failures[request] = _own(request, error)
        self._send()

    def _run_what_is_left(self) -> None:
        """Requests that came while the engine was being shut down: they are told so like the others."""
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None:
                call()

    def _start(self, requests: Sequence[Request], inbox: _Inbox) -> None:
        for place, request in enumerate(requests):
            self._running[request] = _Place(inbox, place)
            try:
                self.llm.frontend.start(request)
            except Exception as error:  # whatever it is, it is this request's own
                self._fail(request, _own(request, error))

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._running.pop(request, None)
            self.llm.frontend.abort(request)

    def _post(self, request: Request) -> None:
        if request.error:
            raise request.as_error()
        inbox, place = self._running[request]
        self._mail += [(inbox, (place, delta)) for delta in request.deltas()]
        if request.is_finished:
            del self._running[request]

    def _fail(self, request: Request, error: Exception) -> None:
        inbox, place = self._running[request]
        self._end([request])
        self._mail.append((inbox, (place, error)))

    def _close(self, error: Exception) -> None:
        for request in list(self._running):
            self._fail(request, error)

    def _send(self) -> None:
        """Everybody's news of a step, with one call to each loop."""
        mail, self._mail = self._mail, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, _Item]]] = {}
        for inbox, item in mail:
            by_loop.setdefault(inbox.loop, []).append((inbox, item))
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(_put_all, items)


_Item = tuple[int, Delta | Exception]


class _Inbox:
    """What a coroutine has not read yet. Touched by its own loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: list[_Item] = []
        self._has_some = asyncio.Event()

    def put(self, item: _Item) -> None:
        self._items.append(item)
        self._has_some.set()

    async def take(self) -> list[_Item]:
        """All that is there; waits for some."""
        await self._has_some.wait()
        self._has_some.clear()
        items, self._items = self._items, []
        return items


def _own(request: Request, error: Exception) -> ForedraftError:
    """What ends one request, as its caller meets it."""
    if isinstance(error, ForedraftError):
        return error
    request.fail(error)
    return request.as_error()


class _Place(NamedTuple):
    """Whose request it is: its inbox, and its place among the requests that share it."""

    inbox: _Inbox
    place: int


def _put_all(items: list[tuple[_Inbox, _Item]]) -> None:
    for inbox, item in items:
        inbox.put(item)
