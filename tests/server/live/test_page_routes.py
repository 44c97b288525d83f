"""The page and its stream, without a browser: what is served, and that no watcher blocks anything."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from foredraft import LLM, SamplingParams
from foredraft.server.live import PUBLIC_PATHS, LiveObserver, live_routes
from foredraft.server.live.page_routes import HEARTBEAT_SECONDS
from tests.trace.test_view import Scripts

Message = MutableMapping[str, Any]


@pytest.fixture
def observer(make_observer: Any) -> LiveObserver:
    made: LiveObserver = make_observer(max_watchers=1)
    return made


@pytest.fixture
def app(observer: LiveObserver) -> FastAPI:
    app = FastAPI()
    app.include_router(live_routes(observer))
    return app


class Client:
    """A client of the event stream over ASGI. stuck: whether it never accepts what it is sent."""

    def __init__(self, app: FastAPI, *, stuck: bool = False) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.stuck = stuck
        self.task = asyncio.ensure_future(self._run(app))

    async def _run(self, app: Callable[..., Awaitable[None]]) -> None:
        asked = asyncio.Event()

        async def receive() -> Message:
            if not asked.is_set():
                asked.set()
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if self.stuck and message["type"] == "http.response.body":
                await asyncio.Event().wait()
            self.sent.append(message)

        scope = {
            "type": "http", "method": "GET", "path": "/live/events", "raw_path": b"/live/events", "headers": [],
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
        }  # fmt: skip
        await app(scope, receive, send)

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [json.loads(event[6:]) for event in self.body.split("\n\n") if event.startswith("data: ")]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                await asyncio.sleep(0.01)


def test_the_page_uses_no_other_host_and_its_policy_forbids_it(app: FastAPI) -> None:
    answer = TestClient(app).get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:|\*", policy)
    parsed = Scripts(answer.text)
    assert all("src" in attrs and not text.strip() for attrs, text in parsed.found)
    for address in parsed.addresses:
        assert address is None or address.startswith(("live/", "data:image/svg+xml,"))
    assert not re.search(r"\son\w+=|\sstyle=", answer.text)


def test_all_public_files_are_served_and_no_others(app: FastAPI) -> None:
    client = TestClient(app)
    for path in PUBLIC_PATHS:
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        if path.endswith(".css"):
            assert not re.search(r"url\(|@import", answer.text)
    named = {f"/{address.partition('?')[0]}" for address in re.findall(r'"(live/[^"]+)"', client.get("/").text)}
    assert named | {"/"} == PUBLIC_PATHS
    for path in ("/live/", "/live/page.html", "/live/../observer.py", "/live/%2e%2e%2ffeed.py", "/live/replay.html"):
        assert client.get(path).status_code == 404
    assert not app.openapi()["paths"]


def test_a_watcher_gets_events_and_may_leave(llm: LLM, app: FastAPI, observer: LiveObserver) -> None:
    async def run() -> None:
        client = Client(app)
        await client.until(lambda: len(client.frames) == 1)
        assert client.frames[0]["about"]["show_text"] is True
        await asyncio.to_thread(llm.generate, "def area(radius):", SamplingParams(max_tokens=20, ignore_eos=True))

        def written() -> int:
            return max((text["num_tokens"] for frame in client.frames for text in frame["texts"]), default=0)

        await client.until(lambda: written() == 20)
        headers = dict(client.sent[0]["headers"])
        assert headers[b"content-type"].startswith(b"text/event-stream")
        second = Client(app)
        await second.until(lambda: second.task.done())
        assert second.sent[0]["status"] == 503
        assert "limit" in json.loads(second.body)["error"]["message"]
        client.gone.set()
        await client.until(lambda: client.task.done())
        third = Client(app)
        await third.until(lambda: len(third.frames) == 1)
        observer.close()
        await third.until(lambda: third.task.done())
        assert third.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_a_stuck_watcher_is_dropped(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.server.live.page_routes.STUCK_SECONDS", 0.05)

    async def run() -> None:
        client = Client(app, stuck=True)
        await client.until(lambda: client.task.done())
        assert client.task.exception() is None
        other = Client(app)
        await other.until(lambda: len(other.frames) == 1)
        other.gone.set()
        await other.task

    asyncio.run(run())


def test_heartbeats_are_sent_while_idle(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    assert HEARTBEAT_SECONDS < 15  # after 15 seconds the page considers the connection lost
    monkeypatch.setattr("foredraft.server.live.page_routes.HEARTBEAT_SECONDS", 0.0)

    async def run() -> None:
        client = Client(app)
        await client.until(lambda: client.body.count("\n\n: ") >= 2)
        client.gone.set()
        await client.task

    asyncio.run(run())
