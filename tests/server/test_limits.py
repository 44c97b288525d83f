"""Limits of requests, and clients that do not read, do not write or disconnect."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest

from foredraft import LLM
from foredraft.server import RequestLimits
from tests.server.conftest import SETTINGS, Running, running, wait_for

STORY = "Once upon a time, there was a little"
LONG: dict[str, Any] = {"prompt": STORY, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


def limited(**limits: Any) -> Any:
    return replace(SETTINGS, limits=RequestLimits(**limits))


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def raw_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closes the connection by itself."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_requests_to_a_full_queue_are_refused(llm: LLM) -> None:
    most = llm.max_num_seqs
    with running(llm, limited(max_queue=0)) as server:
        body = {**LONG, "n": most, "stream": True}
        with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            refused = server.post("/v1/completions", {"prompt": STORY})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert refused.headers["retry-after"]
            assert server.get("/ready").status_code == 200
        server.wait_until_idle()
        assert server.post("/v1/completions", {"prompt": STORY}).status_code == 200


def test_a_request_that_takes_too_long_is_ended(llm: LLM) -> None:
    with running(llm, limited(request_seconds=0.75)) as server:
        answer = server.post("/v1/completions", {**LONG, "n": 16})
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "timeout"
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match=r"0\.75 seconds"):
            list(
                client.completions.create(
                    model="pair", prompt=STORY, max_tokens=2000, n=16, stream=True, extra_body={"ignore_eos": True}
                )
            )
        server.wait_until_idle()
        assert server.post("/v1/completions", {"prompt": STORY, "max_tokens": 2}).status_code == 200


def test_a_too_long_prompt_is_refused(llm: LLM) -> None:
    with running(llm, limited(max_prompt_tokens=5)) as server:
        answer = server.post("/v1/completions", {"prompt": [5] * 6})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert server.post("/v1/completions", {"prompt": [5] * 5}).status_code == 200


def test_half_open_connections_are_closed(llm: LLM) -> None:
    with running(llm, limited(header_seconds=0.3, body_seconds=0.3)) as server:
        silent, half, bodyless, kept = (connect(server) for _ in range(4))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        bodyless.sendall(raw_request({"prompt": STORY})[:-5])
        assert is_closed(silent)
        assert is_closed(half)
        assert bodyless.recv(1000).startswith(b"HTTP/1.1 408")
        # this one was answered, and begins another request without finishing it
        kept = connect(server)
        kept.sendall(raw_request({"prompt": STORY, "max_tokens": 1}))
        assert b"200 OK" in kept.recv(10_000)
        kept.sendall(b"GET /health HTTP/1.1\r\n")
        assert is_closed(kept)
        for connection in (silent, half, bodyless, kept):
            connection.close()
        server.wait_until_idle()


def test_a_client_that_does_not_read_is_disconnected(llm: LLM) -> None:
    """Its answer is larger than the sockets' buffers. Meanwhile other clients are served."""
    with running(llm, limited(write_seconds=0.3)) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        body = {"prompt": STORY, "max_tokens": 2000, "n": 16, "ignore_eos": True, "logprobs": 20, "stream": True}
        connection.sendall(raw_request(body))
        wait_for(lambda: server.service.num_texts > 0)
        assert server.post("/v1/completions", {"prompt": STORY, "max_tokens": 3}).status_code == 200
        server.wait_until_idle()
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_place(llm: LLM, stream: bool) -> None:
    with running(llm) as server:
        expected = server.post("/v1/completions", {**LONG, "max_tokens": 40}).json()["choices"][0]["text"]
        free = llm.engine.pool.used - llm.engine.pool.bytes_retained
        connection = connect(server)
        connection.sendall(raw_request({**LONG, "n": 16, "stream": stream}))
        wait_for(lambda: llm.engine.num_running > 0)
        texts: list[str] = []
        other = threading.Thread(
            target=lambda: texts.append(
                server.post("/v1/completions", {**LONG, "max_tokens": 40}).json()["choices"][0]["text"]
            )
        )
        other.start()
        connection.close()
        wait_for(lambda: server.service.num_texts <= 1)
        other.join(120)
        assert texts == [expected]
        server.wait_until_idle()
        assert llm.engine.pool.used - llm.engine.pool.bytes_retained == free
        assert b'request_aborted_total{reason="disconnect"} 1.0' in server.service.metrics.text()


def test_a_stream_cancelled_by_the_client_is_aborted(llm: LLM) -> None:
    with running(llm) as server:

        async def main() -> None:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                stream = await client.completions.create(
                    model="pair", prompt=STORY, max_tokens=2000, n=8, stream=True, extra_body={"ignore_eos": True}
                )
                async for _ in stream:
                    break
                await stream.close()
                task = asyncio.create_task(
                    client.completions.create(
                        model="pair", prompt=STORY, max_tokens=2000, n=8, extra_body={"ignore_eos": True}
                    )
                )
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(main())
        server.wait_until_idle()
        # of two: the second may not have begun when the stream was cancelled
        aborted = [b'request_aborted_total{reason="disconnect"} %d.0' % count for count in (1, 2)]
        assert any(line in server.service.metrics.text() for line in aborted)
