"""The asyncio API: one thread runs the engine, and coroutines send their calls to that thread."""

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

_NUM_COMPILING = 8  # threads; more than can compile at once, since some only wait for a grammar that another compiles
_CLOSED = "this AsyncLLM was shut down: make a new one"


class AsyncLLM:
    """An LLM for many concurrent coroutines. Takes the arguments of LLM, or an LLM that nothing else uses.

    Use as `async with AsyncLLM(...) as llm`, or call `shutdown()` at the end. Raises ForedraftError for an LLM that another
    AsyncLLM is running.
    """

    def __init__(self, *args: Any, llm: LLM | None = None, **settings: Any) -> None:
        self.llm = llm or LLM(*args, **settings)
        if not self.llm.engine.in_use.acquire(blocking=False):
            raise ForedraftError(
                "this LLM is already used by another AsyncLLM: shut that one down first, or make another LLM"
            )
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[Request, _Recipient] = {}
        self._mail: list[tuple[_Inbox, _Item]] = []
        self._failures: dict[Request, Exception] = {}
        self._gate = threading.Lock()  # no call is put after the last one that the thread reads
        self._is_closed = False
        # a separate pool: threads that wait for grammars must not block the tokenising of prompts
        self._compiling = ThreadPoolExecutor(_NUM_COMPILING, "foredraft-grammar")
        self._thread = threading.Thread(target=self._run_engine, name="foredraft-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._is_closed

    def shutdown(self) -> None:
        """End every running request and the thread. May be called more than once."""
        with self._gate:
            self._is_closed = True
            self._calls.put(None)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, client: str = "", priority: int = 0
    ) -> AsyncIterator[Delta]:
        """Yield deltas as they are generated. Leaving the loop, or cancelling the task, ends the request.

        client, priority: see prepare.

        Raises ForedraftError for a request that cannot be honoured, RequestError if it fails while it runs.
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
        """Run a request and return its whole output. Concurrent requests share the engine's batch: `asyncio.gather` them.

        client, priority: see prepare. Raises what stream raises.
        """
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
        """Check and tokenise a prompt, and compile its grammar. -> a request to `follow`

        The work is done in other threads: a long prompt delays no other request, and a new grammar delays only other requests with
        new grammars. client: the sender of the request; clients are served fairly. priority: orders the requests of one client; the
        lower, the earlier. request_id: None generates one. Raises ForedraftError for a request that cannot be honoured.
        """
        frontend, compiling = self.llm.frontend, None
        if sampling_params is not None and await asyncio.to_thread(frontend.must_compile, sampling_params):
            self._require_open()
            compiling = self._compiling
        prepare = partial(
            frontend.prepare, prompt, sampling_params, client=client, priority=priority, request_id=request_id
        )
        return await asyncio.get_running_loop().run_in_executor(compiling, prepare)

    async def follow(self, requests: Sequence[Request]) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Run prepared requests until all are complete. Yields lists of (index of the request, delta).

        Deltas that arrive while the caller is busy come in one list. Closing the iterator, or cancelling the task, ends
        all requests before the next step. Raises RequestError if one of them fails, and ForedraftError after a shutdown;
        either ends the other requests too.
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
                deltas = [(index, item) for index, item in batch if isinstance(item, Delta)]
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

    def _run_engine(self) -> None:
        try:
            while self._run_calls():
                self._step()
                self._send()
        finally:
            with self._gate:
                self._is_closed = True
            self._run_last_calls()
            self._close(ForedraftError("the engine was shut down"))
            self.llm.engine.in_use.release()
            self._send()

    def _run_calls(self) -> bool:
        """Run the queued calls; wait for one only if the engine has no work. False: shut down."""
        while True:
            has_work = self.llm.engine.has_work
            if not has_work:  # a call may have ended the work before the step that would have sent the last deltas
                self._send_all()
            try:
                call = self._calls.get(block=not has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            self._send()

    def _step(self) -> None:
        """Run one step. If the device runs asynchronously, the deltas of a step are sent while the next one computes."""
        runs_ahead = self.llm.target.runs_ahead
        try:
            self.llm.engine.step(self._post_all if runs_ahead else None)
        except Exception as error:
            self._close(error)
        if not (runs_ahead and self.llm.engine.has_work):
            self._post_all()
        self._fail_recorded()

    def _send_all(self) -> None:
        self._post_all()
        self._fail_recorded()
        self._send()

    def _fail_recorded(self) -> None:
        failures, self._failures = self._failures, {}
        for request, failure in failures.items():
            if request in self._running:  # otherwise it has ended with the engine
                self._fail(request, failure)

    def _post_all(self) -> None:
        """Send the new deltas of all requests. No request can be ended in the middle of a step, so failures are recorded."""
        for request in list(self._running):
            try:
                self._post(request)
            except Exception as error:  # its text could not be decoded; the others continue
                self._failures[request] = _as_foredraft_error(request, error)
        self._send()

    def _run_last_calls(self) -> None:
        """Start the requests that arrived during the shutdown, so that they fail like the others."""
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None:
                call()

    def _start(self, requests: Sequence[Request], inbox: _Inbox) -> None:
        for index, request in enumerate(requests):
            self._running[request] = _Recipient(inbox, index)
            self.llm.frontend.start_isolated(request)
            if request.failure is not None:
                self._fail(request, _as_foredraft_error(request, request.failure))

    def _end(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._running.pop(request, None)
            self.llm.frontend.abort(request)

    def _post(self, request: Request) -> None:
        if request.error:
            raise request.as_error()
        inbox, index = self._running[request]
        self._mail += [(inbox, (index, delta)) for delta in request.deltas()]
        if request.is_finished:
            del self._running[request]

    def _fail(self, request: Request, error: Exception) -> None:
        inbox, index = self._running[request]
        self._end([request])
        self._mail.append((inbox, (index, error)))

    def _close(self, error: Exception) -> None:
        for request in list(self._running):
            self._fail(request, error)

    def _send(self) -> None:
        """Deliver the items of a step with one call to each event loop."""
        mail, self._mail = self._mail, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, _Item]]] = {}
        for inbox, item in mail:
            by_loop.setdefault(inbox.loop, []).append((inbox, item))
        for loop, items in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_put_all, items)


_Item = tuple[int, Delta | Exception]
"""The index of the request, and the delta or the error for its caller."""


class _Inbox:
    """The items that a coroutine has not read yet. Used only in the coroutine's own event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._items: list[_Item] = []
        self._has_items = asyncio.Event()

    def put(self, item: _Item) -> None:
        self._items.append(item)
        self._has_items.set()

    async def take(self) -> list[_Item]:
        """All items; waits until there are some."""
        await self._has_items.wait()
        self._has_items.clear()
        items, self._items = self._items, []
        return items


def _as_foredraft_error(request: Request, error: Exception) -> ForedraftError:
    """The error that the caller of a request receives."""
    if isinstance(error, ForedraftError):
        return error
    request.fail(error)
    return request.as_error()


class _Recipient(NamedTuple):
    """Where the deltas of a request go. request_index: its index among the requests that share the inbox."""

    inbox: _Inbox
    request_index: int


def _put_all(items: list[tuple[_Inbox, _Item]]) -> None:
    for inbox, item in items:
        inbox.put(item)
