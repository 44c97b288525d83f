"""Bad input is answered with an error in OpenAI's form that says what is wrong, and does not affect other requests."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx2
import pytest

from tests.server.conftest import Running

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def error_of(answer: httpx2.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which must have this status and OpenAI's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    ((key, error),) = answer.json().items()
    assert key == "error"
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    found: dict[str, Any] = error
    return found


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": PROMPT, "max_tokens": "5"}, "max_tokens", "integer"),
        ({"prompt": PROMPT, "max_tokens": True}, "max_tokens", "integer"),
        ({"prompt": PROMPT, "max_tokens": 0}, "max_tokens", "use it with echo"),
        ({"prompt": PROMPT, "temperature": -1}, "temperature", "0"),
        ({"prompt": PROMPT, "temperature": "hot"}, "temperature", "number"),
        ({"prompt": PROMPT, "stream": "yes"}, "stream", "boolean"),
        ({"prompt": PROMPT, "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": PROMPT, "n": 1_000_000}, "n", "128"),
        ({"prompt": PROMPT, "logprobs": 21}, "logprobs", "20"),
        ({"prompt": PROMPT, "stop": [""]}, "stop[0]", "1 character"),
        ({"prompt": PROMPT, "stop": [1]}, "stop[0]", "string"),
        ({"prompt": PROMPT, "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"prompt": PROMPT, "logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"prompt": PROMPT, "logit_bias": {"999999999": 1}}, "logit_bias", "valid ids are 0"),
        ({"prompt": PROMPT, "top_k": 2**63}, "top_k", "less than or equal to"),
        ({"prompt": PROMPT, "top_k": 10**30}, "top_k", "less than or equal to"),
        ({"prompt": PROMPT, "top_k": -2}, "top_k", "greater than or equal to"),
        ({"prompt": PROMPT, "seed": 2**64}, "seed", "less than or equal to"),
        ({"prompt": PROMPT, "seed": -(2**70)}, "seed", "greater than or equal to"),
        ({"prompt": PROMPT, "max_tokens": 2**63}, "max_tokens", "2^63"),
        ({"prompt": PROMPT, "min_tokens": 2**63}, "min_tokens", "less than or equal to"),
        ({"prompt": PROMPT, "speculative_tokens": 2**63}, "speculative_tokens", "less than or equal to"),
        ({"prompt": PROMPT, "stop_token_ids": [2**63]}, "stop_token_ids", "token ids"),
        ({"prompt": PROMPT, "temperature": 1e39}, "temperature", "less than or equal to"),
        ({"prompt": PROMPT, "repetition_penalty": 1e-300}, "repetition_penalty", "greater than or equal to"),
        ({"prompt": [2**63]}, "prompt", "valid ids are 0"),
        ({"prompt": PROMPT, "suffix": "."}, "suffix", "not supported"),
        ({"prompt": PROMPT, "best_of": 2}, None, "best_of"),
        ({"prompt": PROMPT, "stream_options": {}}, None, "stream_options"),
        ({"prompt": PROMPT, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "max_tokens"),
        ({"prompt": PROMPT, "seed": 1, "verification": "block"}, None, "seed"),
        ({"prompt": PROMPT, "use_beam_search": True}, "use_beam_search", "beam search"),
        ({"prompt": PROMPT, "max_new_tokens": 5}, "max_new_tokens", "max_tokens"),
        ({"prompt": PROMPT, "messages": CHAT}, "messages", "another route"),
        ({"prompt": []}, "prompt", "list"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [PROMPT, 3]}, "prompt", "number 1"),
        ({"prompt": [[1], [-1]]}, "prompt", "number 1"),
        ({"prompt": ["a"] * 129}, "prompt", "128"),
        ({"prompt": ["a"] * 20, "n": 20}, None, "128"),
        ({"prompt": [10**9]}, "prompt", "valid ids are 0"),
        ({"prompt": [10**30]}, "prompt", "valid ids are 0"),
        ({"prompt": "\ud800"}, "prompt", "valid Unicode"),
        ({}, "prompt", "required"),
        ([], None, "JSON object"),
        ("text", None, "JSON object"),
        (None, None, "JSON object"),
        ({"prompt": PROMPT, "response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"prompt": PROMPT, "guided_regex": "a", "guided_json": {}}, None, "one of them"),
        ({"prompt": PROMPT, "guided_choice": []}, "guided_choice", "at least one"),
        (
            {"prompt": PROMPT, "structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "exactly one",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_completion_requests_are_refused_by_field(
    server: Running, body: Any, param: str | None, words: str
) -> None:
    error = error_of(_post_json(server, "/v1/completions", body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
        ({"messages": CHAT, "max_completion_tokens": 1, "min_tokens": 2}, "min_tokens", "max_tokens"),
        ({"messages": CHAT, "max_completion_tokens": 1, "max_tokens": 2}, None, "max_tokens"),
        ({"messages": CHAT, "top_logprobs": 2}, None, "logprobs"),
        ({"messages": CHAT, "tool_choice": "required"}, None, "tool_choice: required needs tools"),
        ({"messages": CHAT, "tools": [TOOL], "tool_choice": "always"}, "tool_choice", "required"),
        ({"messages": CHAT, "tools": [TOOL], "tool_choice": named("g")}, None, "tool_choice names 'g'"),
        ({"messages": CHAT, "tools": [TOOL], "tool_choice": named("f"), "guided_regex": "a"}, None, "tool_choice"),
        ({"messages": CHAT, "tools": [BAD_TOOL], "tool_choice": "required"}, "tools", "nonsense"),
        ({"messages": CHAT, "functions": []}, "functions", "tools"),
        ({"messages": CHAT, "web_search_options": {}}, "web_search_options", "not supported"),
        ({"messages": CHAT, "store": True}, "store", "not supported"),
        ({"messages": CHAT, "modalities": ["audio"]}, "modalities", "not supported"),
        ({"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
        ({"messages": CHAT, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
        ({"messages": CHAT, "chat_template_kwargs": {"tokenizer": 1}}, "chat_template_kwargs", "'tokenizer'"),
        ({"messages": CHAT, "prompt": PROMPT}, "prompt", "another route"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_chat_requests_are_refused_by_field(server: Running, body: Any, param: str | None, words: str) -> None:
    error = error_of(_post_json(server, "/v1/chat/completions", body), 400)
    assert error["param"] == param or (param is not None and param in error["message"])
    assert words in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 10_000 + b"}",
        b"\x00\x01\x02",
    ],
    ids=lambda raw: str(raw[:20]),
)
def test_bodies_that_are_not_json_are_refused(server: Running, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(server.post_raw("/v1/completions", raw, headers=headers), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_other_content_types_are_refused(server: Running, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    raw = json.dumps({"prompt": PROMPT}).encode()
    error = error_of(server.post_raw("/v1/completions", raw, headers=headers), 400)
    assert "application/json" in error["message"]


def test_unknown_paths_methods_and_models_are_refused(server: Running) -> None:
    assert error_of(server.get("/v2/completions"), 404)["type"] == "not_found_error"
    answer = server.get("/v1/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    assert error_of(server.post("/v1/completions", {"prompt": "a", "model": "gpt-4"}), 404)["code"] == "model_not_found"


def test_too_long_prompts_are_refused(server: Running) -> None:
    """Prompts of 100,000 tokens as text, ids and messages, and one that is too long to be tokenised at all."""
    for body, path in (
        ({"prompt": "word " * 10_000}, "/v1/completions"),
        ({"prompt": "word " * 100_000}, "/v1/completions"),
        ({"prompt": [5] * 100_000}, "/v1/completions"),
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "/v1/chat/completions"),
        ({"messages": [{"role": "user", "content": "word " * 5_000}]}, "/v1/chat/completions"),
    ):
        error = error_of(server.post(path, body), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if "prompt" in body else "messages")


def test_a_body_of_ten_megabytes_is_refused(server: Running) -> None:
    started = time.perf_counter()
    assert error_of(server.post("/v1/completions", {"prompt": "x" * 10_000_000}), 413)["code"] == "body_too_large"

    def in_pieces() -> Any:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 100_000

    headers = {"content-type": "application/json"}
    error_of(server.post_raw("/v1/completions", in_pieces(), headers=headers), 413)
    assert time.perf_counter() - started < 30


def test_data_that_is_not_http_is_refused(server: Running) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
        assert connection.recv(1000) == b""


def test_the_server_still_works_afterwards(server: Running) -> None:
    server.wait_until_idle()
    assert server.get("/health").json() == {"status": "ok"}
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}).status_code == 200


def _post_json(server: Running, path: str, body: Any) -> httpx2.Response:
    raw = json.dumps(body).encode()  # encoded here, since httpx sends nothing for None and refuses lone surrogates
    return server.post_raw(path, raw, headers={"content-type": "application/json"})
