"""The OpenAPI document is complete: it contains every response."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import response_schema_conformance

from foredraft import LLM
from foredraft.server import RequestLimits, create_app
from foredraft.server.server_settings import MEBIBYTE
from tests.server.conftest import SETTINGS, Running, running

KEY = "a-key"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
GUARDED = replace(SETTINGS, api_key=KEY, limits=RequestLimits(request_seconds=0.1, max_body_bytes=16 * MEBIBYTE))


@pytest.fixture(scope="module")
def brief(llm: LLM) -> Iterator[Running]:
    """A server with short timeouts: only the form of the answers matters, not the texts."""
    with running(llm, GUARDED) as found:
        yield found


def no_llm() -> LLM:
    raise AssertionError("for the document alone")


schema = schemathesis.openapi.from_dict(create_app(GUARDED, no_llm).openapi())


@schema.auth()
class WithKey:
    def get(self, _: Any, __: Any) -> str:
        return KEY

    def set(self, case: Any, key: str, _: Any) -> None:
        case.headers["Authorization"] = f"Bearer {key}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_stream_events_match_the_document(brief: Running, path: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    own = {"/v1/completions": {"prompt": "Hello"}, "/v1/chat/completions": {"messages": messages}}
    body = {**own.get(path, {"input": "Hello"}), "stream": True}
    case = schema[path]["POST"].Case(body=body, media_type="application/json", headers=AUTHORIZED)
    answer = case.call(base_url=brief.url)
    assert answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer, checks=[response_schema_conformance])


CHAT = {"role": "user", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": None},
        {"prompt": None},
        {"prompt": "a"},
        {"prompt": ["a"]},
        {"prompt": [[1]]},
        {"prompt": []},
        {"prompt": [[]]},
        {"messages": None},
        {"messages": []},
        {"messages": [CHAT]},
        {"messages": [CHAT], "prompt": "a"},
        {"messages": [CHAT], "prompt": None},
        {"messages": [CHAT], "add_special_tokens": True},
        {"messages": [CHAT], "add_generation_prompt": True},
        {"prompt": "a", "add_special_tokens": True},
        {"prompt": "a", "add_generation_prompt": True},
        {"prompt": "a", "chat_template_kwargs": None},
        {"prompt": "a", "guided_choice": []},
        {"prompt": "a", "guided_choice": [""]},
        {"prompt": "a", "guided_choice": ["b"]},
        {"messages": [{}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"messages": [{"role": "assistant", "content": None}, CHAT]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, CHAT]},
        {"messages": [{"role": "assistant", "tool_calls": []}, CHAT]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"tokens": None},
        {"tokens": []},
        {"tokens": [1]},
        {"tokens": [-1]},
    ],
    ids=str,
)
def test_exactly_the_documented_bodies_are_accepted(brief: Running, body: dict[str, Any]) -> None:
    """Each route accepts what fits its document, and nothing else."""
    document = brief.app.openapi()
    for path, operations in document["paths"].items():
        if "post" in operations:
            wanted = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
            fits = jsonschema.Draft202012Validator({**wanted, "components": document["components"]}).is_valid(body)
            answer = brief.post(path, body, headers=AUTHORIZED)
            assert (answer.status_code != 400) == fits, (path, fits, answer.text)


def test_every_error_has_the_same_form(brief: Running) -> None:
    found = brief.get("/openapi.json", headers=AUTHORIZED).json()
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            for status, answer in operation["responses"].items():
                if status != "200":
                    (content,) = answer["content"].values()
                    assert content["schema"]["$ref"].endswith("/ErrorBody"), (path, status)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n", 501),
        (b"GET /health HTTP/2.0\r\nhost: x\r\n\r\n", 505),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_of_the_http_layer_are_documented_for_every_route(brief: Running, raw: bytes, status: int) -> None:
    host, port = brief.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(raw)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 %d " % status)
    for path, operations in brief.app.openapi()["paths"].items():
        for operation in operations.values():
            assert str(status) in operation["responses"], path
