"""What the request log contains, and what it must not contain."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from foredraft import LLM
from foredraft.server.request_log import JsonLinesHandler
from tests.server.conftest import SETTINGS, running, wait_for

SECRET = "the rabbit lives under the stairs"
KEY = "key-of-keys"


@contextmanager
def logged() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that gets the lines logged in the block, at its end."""
    stream, lines = io.StringIO(), []
    handler, loggers = JsonLinesHandler(stream), [logging.getLogger(name) for name in ("foredraft", "uvicorn")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)
        lines += [json.loads(line) for line in stream.getvalue().splitlines()]


def lines_of(lines: list[dict[str, Any]], answers: list[httpx2.Response]) -> list[dict[str, Any]]:
    """The line of each answered request, by id: a line is written after its answer was sent, so lines may be in another order."""
    found = {line["request_id"]: line for line in lines if line["event"] == "request"}
    return [found[answer.headers["x-request-id"]] for answer in answers]


def talk(llm: LLM, **settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Send a few requests, good and bad. Returns all lines, and the line of each request."""
    answers = []
    headers = {"authorization": f"Bearer {KEY}"}
    with logged() as lines, running(llm, replace(SETTINGS, api_key=KEY, **settings)) as server:
        body = {"prompt": SECRET, "max_tokens": 3, "user": "somebody"}
        answers.append(server.post("/v1/completions", body, headers=headers))
        answers.append(server.post("/v1/completions", {**body, "stream": True}, headers=headers))
        chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}
        answers.append(server.post("/v1/chat/completions", chat, headers=headers))
        answers.append(server.post("/v1/completions", {**body, SECRET: 1}, headers=headers))
        answers.append(server.post("/v1/completions", body, headers={"authorization": f"Bearer {KEY}-not"}))
        answers.append(server.get(f"/{SECRET}?q={SECRET}", headers=headers))
        _break(server.llm)
        answers.append(server.post("/v1/completions", body, headers=headers))
        assert answers[-1].status_code == 500
        del server.llm.frontend.prepare  # type: ignore[method-assign]
    return lines, lines_of(lines, answers)


def _break(llm: LLM) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"no room for {SECRET}")

    llm.frontend.prepare = fail  # type: ignore[method-assign]


def test_neither_prompts_nor_keys_are_logged(llm: LLM) -> None:
    lines, requests = talk(llm)
    assert SECRET not in json.dumps(lines)
    assert KEY not in json.dumps(lines)
    assert [line["status"] for line in requests] == [200, 200, 200, 200, 401, 404, 500]
    assert requests[3]["ignored"] == ["?"]
    first = requests[0]
    assert first["prompt_tokens"] > 0
    assert first["completion_tokens"] == 3
    assert first["user"] == "somebody"
    assert first["seconds"] > 0
    assert first["route"] == "/v1/completions"
    (failed,) = [line for line in lines if line["event"] == "failed"]
    assert failed["error"] == "RuntimeError"
    assert any("fail" in place for place in failed["at"])


@pytest.mark.parametrize("given", ["abc-123", "a.b_c:d/e+f=g@h", "x" * 128])
def test_a_clients_request_id_is_kept(llm: LLM, given: str) -> None:
    with logged() as lines, running(llm, SETTINGS) as server:
        body = {"prompt": "a", "max_tokens": 1}
        answer = server.post("/v1/completions", body, headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == given
        assert answer.json()["id"] == f"cmpl-{given}"
        refused = server.post("/v1/completions", {"prompt": ""}, headers={"x-request-id": given})
        assert refused.headers["x-request-id"] == given
    assert [line["request_id"] for line in lines if line["event"] == "request"].count(given) == 2


def test_an_unsuitable_request_id_is_replaced(llm: LLM) -> None:
    answers = []
    with logged() as lines, running(llm, SETTINGS) as server:
        for given in ("", "x" * 129, "two words", 'quo"te', "b\u00fc", "a\tb", "{}"):
            answers.append(server.get("/version", headers={"x-request-id": given.encode()}))
            assert answers[-1].status_code == 200
    ids = {line["request_id"] for line in lines_of(lines, answers)}
    assert len(ids) == 7
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def test_prompts_are_logged_with_log_prompts(llm: LLM) -> None:
    lines, requests = talk(llm, log_prompts=True)
    assert requests[0]["prompts"] == [SECRET]
    assert len(requests[0]["texts"]) == 1
    assert KEY not in json.dumps(lines)


def test_a_client_that_disconnects_before_the_response_is_logged_as_499(llm: LLM) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1500, "ignore_eos": True}).encode()
    with logged() as lines, running(llm, SETTINGS) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: gone\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            wait_for(lambda: server.service.num_texts == 1)
        server.wait_until_idle()
        counted = b'http_requests_total{route="/v1/completions",status="499"} 1.0'
        wait_for(lambda: counted in server.service.metrics.text())
    (line,) = [line for line in lines if line.get("request_id") == "gone" and line["event"] == "request"]
    assert line["status"] == 499


def test_a_broken_log_stream_is_no_error() -> None:
    attempts = []

    class Broken(io.StringIO):
        def write(self, line: str) -> int:
            attempts.append(line)
            raise BrokenPipeError

    record = logging.LogRecord("x", logging.INFO, "x", 1, "hello", None, None)
    JsonLinesHandler(Broken()).emit(record)
    assert [json.loads(line)["event"] for line in attempts] == ["hello"]


@pytest.mark.parametrize("message", ["one\ntwo", 'quo"te', "\x00"])
def test_a_log_record_is_one_line(message: str) -> None:
    stream = io.StringIO()
    JsonLinesHandler(stream).emit(logging.LogRecord("x", logging.INFO, "x", 1, message, None, None))
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["level"] == "info"
