"""The one owner of the engine: when it starts and ends, and who is let in."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from foredraft.aio import AsyncLLM
from foredraft.llm import LLM
from foredraft.server.errors import ApiError
from foredraft.server.live import LiveFeed
from foredraft.server.metrics import Metrics
from foredraft.server.prompts import Prompts
from foredraft.server.settings import ServerSettings
from foredraft.server.tool_form import tool_form_of


class Service:
    """Starts, runs and ends one engine for many requests.

    make_llm: loads the models; called once, in `running`.
    """

    def __init__(self, settings: ServerSettings, make_llm: Callable[[], LLM]) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.feed = LiveFeed(show_text=settings.show_text)
        self.tool_form: str | None = None
        """In which the model calls tools; known when it is loaded."""
        self._make_llm = make_llm
        self._engine: AsyncLLM | None = None
        self._prompts: Prompts | None = None
        self._num_texts: Counter[str] = Counter()
        """Of each client that has any."""
        self._is_draining = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The time in which requests are answered. Whatever still runs at its end is ended."""
        llm = await asyncio.to_thread(self._make_llm)
        limits = self.settings.limits
        self.tool_form = tool_form_of(self.settings, llm)
        with self.metrics.watching(llm), self.feed.attached(llm):
            self._engine = AsyncLLM(llm=llm)
            try:
                self._prompts = Prompts(
                    self._engine,
                    max_tokens=limits.max_prompt_tokens,
                    chat_template=self.settings.chat_template,
                    trusts_templates=self.settings.trust_request_chat_template,
                )
                yield
            finally:
                await self.stop()

    def drain(self) -> None:
        """Take no new requests; those that are here are finished. The live page, which has no end of its own, ends."""
        self._is_draining = True
        self.feed.close()

    async def stop(self) -> None:
        """End what is being written, with an error that says so."""
        self.drain()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    @property
    def is_alive(self) -> bool:
        """False once the engine is gone without having been asked to."""
        return self._engine is None or self._engine.is_running or self._is_draining

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and self._engine.is_running and not self._is_draining

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_texts(self) -> int:
        """That are written, or wait to be."""
        return self._num_texts.total()

    @property
    def engine(self) -> AsyncLLM:
        """Raises ApiError 503 where there is none, or none any more."""
        if self._engine is None or not self.is_ready:
            raise self._unavailable()
        return self._engine

    @property
    def prompts(self) -> Prompts:
        """Raises ApiError 503 before there is an engine."""
        if self._prompts is None:
            raise self._unavailable()
        return self._prompts

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError 404 for a model that is not served."""
        names = self.settings.model_names
        if name is not None and name not in names:
            raise ApiError(
                404,
                f"there is no model {name[:200]!r} here: it is {' or '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return name or names[0]

    @contextmanager
    def admitted(self, num_texts: int, client: str = "") -> Iterator[None]:
        """A place for so many texts of this client, to be written or to wait. Raises ApiError 429 where there is none.

        Where others hold all places, a client may still have what would be its share of them.
        """
        most = self.engine.llm.max_num_seqs + self.settings.limits.max_queue
        num_now, own = self.num_texts, self._num_texts[client] + num_texts
        share = most // len(self._num_texts.keys() | {client})
        if num_now and num_now + num_texts > most and own > share:
            raise ApiError(
                429,
                f"{num_now} texts are being written or wait, and at most {most} may: try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._num_texts[client] = own
        try:
            yield
        finally:
            self._num_texts[client] -= num_texts
            self._num_texts = +self._num_texts

    def _unavailable(self) -> ApiError:
        what = "is shutting down" if self._is_draining else "is not ready yet"
        return ApiError(503, f"the server {what}", code="unavailable", headers={"Retry-After": "5"})
