"""The answers to sockets that send too much, too slowly, too often, or stop sending."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from foredraft import LLM
from foredraft.server import RequestLimits
from tests.server.conftest import SETTINGS, Running, running, wait_for

STORY = "Once upon a time, there was a little"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
GUARDED = replace(SETTINGS, api_key="a-key")


@pytest.fixture(scope="module")
def guarded(llm: LLM) -> Iterator[Running]:
    with running(llm, GUARDED) as found:
        yield found


def limited(**limits: Any) -> Any:
    return replace(SETTINGS, limits=RequestLimits(**limits))


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def completion(**fields: Any) -> bytes:
    raw = json.dumps({"prompt": STORY, "temperature": 0, **fields}).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(raw) + raw


def all_of(connection: socket.socket) -> bytes:
    """Everything that is received until the server closes its side."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def next_status(connection: socket.socket) -> int:
    """The status of the next answer, whose headers and content may arrive in several parts."""
    raw = b""
    while True:
        raw += (part := connection.recv(1 << 16))
        assert part, f"the connection ended in {raw[:300]!r}"
        head, separator, content = raw.partition(b"\r\n\r\n")
        if separator and len(content) >= content_length(head):
            ((status, _),) = answers_in(raw)
            return status


def content_length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)


def answers_in(raw: bytes) -> list[tuple[int, bytes]]:
    """Status and content of each answer, without interim answers."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        length = content_length(head)
        content, raw = raw[:length], raw[length:]
        if status >= 200:
            found.append((status, content))
    return found


def error_of(raw: bytes, status: int) -> dict[str, Any]:
    """The error, which must be the last answer, with this status and in OpenAI's form."""
    found, content = answers_in(raw)[-1]
    assert found == status, raw[:300]
    error: dict[str, Any] = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("begin", "more", "status"),
    [
        (b"GET /", b"x" * 65536, 414),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"y" * 65536, 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n" * 10_000, 431),
        (HEALTH + b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"y" * 65536, 431),
        (CHUNKED, b"1;" + b"e" * 100_000 + b"\r\nx\r\n", 431),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000, 431),
    ],
    ids=["request line", "header value", "headers", "second request", "chunk extension", "trailers"],
)
def test_too_long_requests_are_refused_even_without_a_key(
    guarded: Running, begin: bytes, more: bytes, status: int
) -> None:
    """Or as missing the key, if that is noticed first."""
    with connect(guarded) as connection:
        connection.sendall(begin)
        for _ in range(40):
            connection.sendall(more)
        raw = all_of(connection)
        found, _ = answers_in(raw)[-1]
        assert found in (status, 401)
        error_of(raw, found)
    assert guarded.get("/health").status_code == 200


def test_the_limits_are_exact(guarded: Running) -> None:
    limits = GUARDED.limits
    for length, status in (
        (limits.max_request_line_bytes - len("GET  HTTP/1.1 "), 401),
        (limits.max_request_line_bytes, 414),
    ):
        with connect(guarded) as connection:
            connection.sendall(b"GET /" + b"x" * length + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            error_of(all_of(connection), status)
    for count, status in ((limits.max_headers - 2, 401), (limits.max_headers - 1, 431)):
        with connect(guarded) as connection:
            connection.sendall(b"GET /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + b"x: y\r\n" * count + b"\r\n")
            error_of(all_of(connection), status)


def test_two_host_headers_are_refused(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n")
        assert "Host" in error_of(all_of(connection), 400)["message"]


def test_the_body_of_a_refused_request_is_not_read(llm: LLM) -> None:
    """The answer comes at once, and of small chunks that follow no more is read than the limit of a body."""
    settings = replace(GUARDED, limits=RequestLimits(max_body_bytes=100_000))
    with running(llm, settings) as server:
        with connect(server) as connection:
            connection.sendall(CHUNKED)
            for _ in range(20):
                connection.sendall(b"1\r\nx\r\n" * 1_000)
            assert error_of(all_of(connection), 401)
        assert server.get("/health").status_code == 200


def test_a_body_with_an_invalid_chunk_is_refused(llm: LLM) -> None:
    with running(llm) as server, connect(server) as connection:
        connection.sendall(CHUNKED + b'5\r\n{"pro\r\nno size\r\n')
        assert error_of(all_of(connection), 400)["code"] == "bad_http"


def test_slow_headers_time_out(llm: LLM) -> None:
    """Sent byte by byte: each byte must not restart the timeout."""
    with running(llm, limited(header_seconds=0.5)) as server, connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        started = time.monotonic()
        raw = b""
        connection.settimeout(0.02)
        while time.monotonic() - started < 20:
            try:
                raw += (part := connection.recv(1000))
                if not part:
                    break
            except TimeoutError:
                try:
                    connection.sendall(b"y")
                except OSError:
                    break
            except ConnectionResetError:
                break
        assert error_of(raw, 408)["code"] == "timeout"


def test_an_idle_connection_is_closed(llm: LLM) -> None:
    with running(llm, limited(keep_alive_seconds=1)) as server, connect(server) as connection:
        connection.sendall(HEALTH)
        assert [status for status, _ in answers_in(all_of(connection))] == [200]


def test_an_incomplete_pipelined_request_times_out_too(llm: LLM) -> None:
    with running(llm, limited(header_seconds=0.3)) as server, connect(server) as connection:
        connection.sendall(HEALTH + HEALTH + b"GET /health HTTP/1.1\r\nho")
        assert [status for status, _ in answers_in(all_of(connection))] == [200, 200, 408]


def test_silent_connections_do_not_keep_others_out(llm: LLM) -> None:
    with running(llm, limited(max_connections=8)) as server:
        silent = [connect(server) for _ in range(50)]
        assert server.get("/health").status_code == 200
        kept = connect(server)
        kept.sendall(HEALTH)
        assert b"200 OK" in kept.recv(10_000)
        assert len(server.server.server_state.connections) <= 8
        for connection in (*silent, kept):
            connection.close()


def test_with_all_connections_busy_one_more_is_refused(llm: LLM) -> None:
    with running(llm, limited(max_connections=2)) as server:
        busy = [connect(server) for _ in range(2)]
        for connection in busy:
            connection.sendall(completion(max_tokens=1500, stream=True, ignore_eos=True))
        wait_for(lambda: server.service.num_texts == 2)
        with connect(server) as late:
            assert error_of(all_of(late), 503)["code"] == "too_many_connections"
        for connection in busy:
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            connection.close()
        wait_for(lambda: server.service.num_texts == 0)
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize(("version", "stream"), [(b"1.1", False), (b"1.1", True), (b"1.0", False)])
def test_a_client_that_closes_only_its_side_is_answered(llm: LLM, version: bytes, stream: bool) -> None:
    """As by `nc -N`. The request takes longer than the interval at which the server checks for disconnects."""
    with running(llm) as server:
        expected = server.post("/v1/completions", {"prompt": STORY, "temperature": 0, "max_tokens": 300}).json()
        with connect(server) as connection:
            request = completion(max_tokens=300, n=8, stream=stream).replace(b"HTTP/1.1", b"HTTP/" + version)
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            raw = all_of(connection)
        if stream:
            assert raw.rstrip().endswith((b"data: [DONE]", b"0"))
            assert b"data: [DONE]" in raw
        else:
            assert (b"100 Continue" in raw) == (version == b"1.1")
            _, _, content = raw.partition(b"200 OK")
            found = json.loads(content.partition(b"\r\n\r\n")[2])["choices"]
            assert [one["text"] for one in found] == [expected["choices"][0]["text"]] * 8
        server.wait_until_idle()


def test_all_requests_before_the_end_are_answered(llm: LLM) -> None:
    with running(llm) as server, connect(server) as connection:
        connection.sendall(
            HEALTH + completion(max_tokens=30) + HEALTH + b"\r\n"
        )  # an extra line end, as from a shell's echo
        connection.shutdown(socket.SHUT_WR)
        raw = all_of(connection)
        assert [status for status, _ in answers_in(raw)] == [200, 200, 200]


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"GET /health HTTP/1.1\r\nho", "header section"),
        (HEAD + b"content-length: 90\r\n\r\n{", "body"),
        (CHUNKED + b"5\r\n{", "body"),
    ],
    ids=["head", "body", "chunk"],
)
def test_an_incomplete_request_is_refused(llm: LLM, sent: bytes, what: str) -> None:
    with running(llm) as server, connect(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert what in error_of(all_of(connection), 400)["message"]
        server.wait_until_idle()


def test_a_connection_without_a_request_gets_no_answer(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert all_of(connection) == b""


def test_refused_requests_are_counted(guarded: Running) -> None:
    with connect(guarded) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        error_of(all_of(connection), 400)
    assert b'http_requests_total{route="unknown",status="400"}' in guarded.service.metrics.text()


def test_the_server_still_works_afterwards(guarded: Running) -> None:
    guarded.wait_until_idle()
    wait_for(lambda: not guarded.server.server_state.connections)
    answer = guarded.post(
        "/v1/completions", {"prompt": STORY, "max_tokens": 3}, headers={"authorization": "Bearer a-key"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_request_that_is_answered_before_its_body_leaves_the_connection_open(guarded: Running, length: int) -> None:
    """The client may already have sent its next request."""
    with connect(guarded) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % length)
        assert next_status(connection) == 401
        connection.sendall(b"x" * length + HEALTH)
        assert next_status(connection) == 200
        connection.sendall(HEALTH)
        assert next_status(connection) == 200


@pytest.mark.parametrize(
    "request_begin",
    [HEAD + b"content-length: 101\r\n\r\n", CHUNKED + b"65\r\n" + b"x" * 101 + b"\r\n"],
    ids=["content-length", "chunked"],
)
def test_a_body_that_is_too_large_ends_the_connection(llm: LLM, request_begin: bytes) -> None:
    """The client is told so, and may go on sending without a reset, which would lose the answer."""
    with running(llm, limited(max_body_bytes=100)) as server, connect(server) as connection:
        connection.sendall(request_begin)
        answer = all_of(connection)
        assert b"\r\nconnection: close\r\n" in answer.lower()
        assert error_of(answer, 413)["code"] == "body_too_large"
        for _ in range(10):
            connection.sendall(b"x" * 10_000)
        assert connection.recv(1) == b""


def test_an_endless_body_of_a_refused_request_ends_the_connection(llm: LLM) -> None:
    settings = replace(GUARDED, limits=RequestLimits(max_body_bytes=50_000))
    with running(llm, settings) as server, connect(server) as connection:
        connection.sendall(CHUNKED)
        assert next_status(connection) == 401
        for _ in range(20):
            connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        assert all_of(connection) == b""


def test_the_body_of_a_refused_request_must_arrive_in_time(llm: LLM) -> None:
    settings = replace(GUARDED, limits=RequestLimits(body_seconds=0.5))
    with running(llm, settings) as server, connect(server) as connection:
        connection.sendall(HEAD + b"content-length: 10\r\n\r\n")
        assert next_status(connection) == 401
        assert all_of(connection) == b""
