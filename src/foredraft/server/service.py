"""Owns the engine: starts and stops it, and admits requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from foredraft.aio import AsyncLLM
from foredraft.llm import LLM
from foredraft.server.api_errors import ApiError
from foredraft.server.live import LiveObserver
from foredraft.server.metrics import Metrics
from foredraft.server.prompt_processor import PromptProcessor
from foredraft.server.server_settings import ServerSettings
from foredraft.server.tool_call_format import detect_tool_call_parser
from foredraft.vocabulary import TokenBytes


class Service:
    """Runs one engine for many requests. make_llm: loads the models; it is called once, by `running`."""

    def __init__(self, settings: ServerSettings, make_llm: Callable[[], LLM]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.live_observer = LiveObserver(show_text=settings.show_text)
        self.tool_call_parser: str | None = None
        """The name of the parser for the model's tool calls; known once the model is loaded."""
        self.token_bytes: TokenBytes | None = None
        """Of the model's tokenizer, if it has one; known once the model is loaded."""
        self._make_llm = make_llm
        self._engine: AsyncLLM | None = None
        self._prompt_processor: PromptProcessor | None = None
        self._num_texts: Counter[str] = Counter()
        """Running and waiting texts of each client that has any."""
        self._is_draining = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load the models and answer requests inside the block. Requests that are still running at its end are aborted."""
        llm = await asyncio.to_thread(self._make_llm)
        limits = self.settings.limits
        self.tool_call_parser = detect_tool_call_parser(self.settings, llm)
        self.token_bytes = None if llm.tokenizer is None else TokenBytes(llm.tokenizer)
        with self.metrics.observing(llm), self.live_observer.attached(llm):
            self._engine = AsyncLLM(llm=llm)
            try:
                self._prompt_processor = PromptProcessor(
                    self._engine,
                    max_tokens=limits.max_prompt_tokens,
                    chat_template=self.settings.chat_template,
                    trusts_templates=self.settings.trust_request_chat_template,
                )
                yield
            finally:
                await self.stop()

    def drain(self) -> None:
        """Accept no new requests, and let running ones finish. The streams of the live page, which would never end, are closed."""
        self._is_draining = True
        self.live_observer.close()

    async def stop(self) -> None:
        """Abort the running requests, with an error that says so."""
        self.drain()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    @property
    def is_alive(self) -> bool:
        """False if the engine ended on its own."""
        return self._engine is None or self._engine.is_running or self._is_draining

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and self._engine.is_running and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_texts(self) -> int:
        """The number of running and waiting texts."""
        return self._num_texts.total()

    @property
    def engine(self) -> AsyncLLM:
        """Raises ApiError 503 while the server starts or shuts down."""
        if self._engine is None or not self.is_ready:
            raise self._unavailable()
        return self._engine

    @property
    def prompt_processor(self) -> PromptProcessor:
        """Raises ApiError 503 while the server starts."""
        if self._prompt_processor is None:
            raise self._unavailable()
        return self._prompt_processor

    def check_model(self, name: str | None) -> str:
        """The model's name for the response. Raises ApiError 404 for a model that is not served."""
        names = self.settings.model_names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r}: this server's model is named {' or '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    @contextmanager
    def admitted(self, num_texts: int, client: str = "") -> Iterator[None]:
        """Admit this many texts of a client for the duration of the block. Raises ApiError 429 if the queue is full.

        When the queue is full, a client that has less than its equal share of it is still admitted.
        """
        max_texts = self.engine.llm.max_num_seqs + self.settings.limits.max_queue
        num_total, num_of_client = self.num_texts, self._num_texts[client] + num_texts
        share = max_texts // len(self._num_texts.keys() | {client})
        if num_total and num_total + num_texts > max_texts and num_of_client > share:
            raise ApiError(
                429,
                f"{num_total} texts are running or waiting, but at most {max_texts} are allowed: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._num_texts[client] = num_of_client
        try:
            yield
        finally:
            self._num_texts[client] -= num_texts
            self._num_texts = +self._num_texts

    def _unavailable(self) -> ApiError:
        state = "is shutting down" if self._is_draining else "is not ready yet"
        return ApiError(503, f"the server {state}", code="unavailable", headers={"Retry-After": "5"})
