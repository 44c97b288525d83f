"""Shutdown: the first signal drains, the second stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2
import openai
import pytest

from foredraft import LLM
from tests.server.conftest import running, wait_for

STORY = "Once upon a time, there was a little"


class Streaming(threading.Thread):
    """A client that streams a long text."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(daemon=True)
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._settings = {"max_tokens": 600, "n": 4, **settings}
        self.finish_reasons: list[str] = []
        self.error: Exception | None = None
        self.has_begun = threading.Event()

    def run(self) -> None:
        try:
            for chunk in self._client.completions.create(
                model="pair", prompt=STORY, stream=True, extra_body={"ignore_eos": True}, **self._settings
            ):
                self.has_begun.set()
                self.finish_reasons += [one.finish_reason for one in chunk.choices if one.finish_reason]
        except Exception as error:
            self.error = error
        self.has_begun.set()

    def begin(self) -> Streaming:
        self.start()
        assert self.has_begun.wait(30)
        return self


@pytest.mark.slow
def test_the_first_signal_drains(llm: LLM) -> None:
    with running(llm) as server:
        client = Streaming(server.url).begin()
        kept = httpx2.Client(base_url=server.url)
        server.server.end()
        wait_for(lambda: server.service.is_draining)
        with suppress(httpx2.TransportError):  # the port is closed soon
            assert httpx2.get(f"{server.url}/ready").status_code == 503
        client.join(60)
        assert client.error is None
        assert client.finish_reasons == ["length"] * 4
        server.thread.join(30)
        assert not server.thread.is_alive()
        kept.close()
    assert not llm.engine.has_work


def test_the_second_signal_stops(llm: LLM) -> None:
    with running(llm) as server:
        client = Streaming(server.url, n=32, max_tokens=2000).begin()
        server.server.end()
        wait_for(lambda: server.service.is_draining)
        server.server.end()
        server.thread.join(10)
        assert not server.thread.is_alive()
        client.join(10)
        assert isinstance(client.error, openai.APIError)
        assert "shutting down" in str(client.error)
    assert not llm.engine.has_work
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def test_the_second_signal_answers_a_request_whose_body_is_incomplete(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    begin = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    with running(llm) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(begin)
            wait_for(lambda: any(one.is_answering for one in server.server.server_state.connections))
            server.server.end()
            server.server.end()
            answer = connection.makefile("rb").read()
        server.thread.join(30)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["message"] == "the server is shutting down"
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_new_requests_are_refused_while_draining(llm: LLM) -> None:
    with running(llm) as server:
        server.service.drain()
        for answer in (server.get("/ready"), server.post("/v1/completions", {"prompt": STORY})):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the server is shutting down"
        assert server.get("/health").status_code == 200


def test_without_its_engine_a_server_is_not_healthy(llm: LLM) -> None:
    with running(llm) as server:
        server.service.engine.shutdown()
        assert server.get("/health").status_code == 503
        assert server.get("/ready").status_code == 503
        assert server.post("/v1/completions", {"prompt": STORY}).status_code == 503


@contextmanager
def served(*args: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run the command. Yields its process and the log line that says where it listens."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "foredraft.cli",
            "serve",
            "--port",
            "0",
            "--num-threads",
            "1",
            "--served-model-name",
            "pair",
            *args,
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("{") and (found := json.loads(line))["event"] == "listening":
                yield process, found
                break
        else:
            raise AssertionError("it never listened")
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.slow
def test_the_command_drains_at_a_signal_and_stops_at_the_second() -> None:
    with served() as (process, found):
        client = Streaming(found["url"]).begin()
        process.send_signal(signal.SIGTERM)
        client.join(60)
        assert client.error is None
        assert client.finish_reasons == ["length"] * 4
        assert process.wait(20) == 0
    with served() as (process, found):
        client = Streaming(found["url"], n=64, max_tokens=2000).begin()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        client.join(10)
        assert isinstance(client.error, openai.APIError)


@pytest.mark.slow
def test_the_key_may_come_from_the_environment() -> None:
    with served(FOREDRAFT_API_KEY="secret") as (_, found):
        assert found["needs_key"]
        assert httpx2.get(f"{found['url']}/v1/models").status_code == 401
        assert httpx2.get(f"{found['url']}/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
