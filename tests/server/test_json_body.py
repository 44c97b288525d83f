"""Errors of bodies that cannot be parsed give the reason and the position."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import pytest

from foredraft.server.api_errors import ApiError
from foredraft.server.json_body import parse
from tests.server.conftest import Running

JSON = {"content-type": "application/json"}
LONE = "\ud800"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PROMPT: dict[str, Any] = {"prompt": "Once", "max_tokens": 2}


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b'{"a": {"b": [0, NaN]}}', "a.b[1]", "NaN is not a number in JSON"),
        (b'{"a": -Infinity}', "a", "-Infinity is not a number"),
        (b'{"a": 1e999}', "a", "too large"),
        (b'{"a": -' + b"9" * 400 + b".5}", "a", "too large"),
        (b'{"a": [' + b"9" * 5000 + b"]}", "a[0]", "a number with 5000 digits is too large"),
        (b'{"a": -' + b"9" * 5000 + b"}", "a", "a number with 5000 digits"),
        (b'{"a": "xy\\ud800"}', "a", "\\ud800 at character 2"),
        (b'{"a": "\\udc00\\ud800"}', "a", "\\udc00 at character 0"),
        (b'{"a": {"b\\uDABC": 1}}', "a", "field name b\\udabc"),
        (b'{"\\ud800": 1}', None, "field name \\ud800"),
        (b'"\\ud800"', None, "the body: must be valid Unicode"),
        (b"[" * 100_000, None, "nested"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, None, "nested more than 200 levels deep"),
        (b"[" * 201 + b"]" * 201, None, "nested more than 200 levels deep"),
        (b'{"a":' * 200 + b"{}" + b"}" * 200, None, "nested more than 200 levels deep"),
        (b'{"a": "\xff"}', None, "not UTF-8: it contains the byte 0xff at position 7"),
        (b'{"a": "\xed\xa0\x80"}', None, "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), None, "not UTF-8"),
        (b'{"a": 1,}', None, "not JSON"),
        (b'{"a": 1', None, "not JSON"),
        (b'{"a": 01}', None, "not JSON"),
        (b"{'a': 1}", None, "not JSON"),
        (b'{"a": "\n"}', None, "control character"),
        (b'{"a": 1} x', None, "Extra data"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_have_the_right_reason_and_position(raw: bytes, param: str | None, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(raw)
    assert caught.value.status_code == 400
    assert caught.value.param == param
    assert words in caught.value.detail
    assert len(caught.value.detail) < 300
    json.loads(caught.value.body)


@pytest.mark.parametrize(
    "value",
    [{}, [1, -2.5, 1e300, True, None], {"a": {"b": ["\U0001f600", "é"]}}, 10**4000, "1e999 " + "9" * 400, "", {"": 1}],
    ids=lambda value: str(value)[:30],
)
def test_all_valid_json_is_read(value: Any) -> None:
    assert parse(json.dumps(value).encode()) == value
    assert parse(b"\xef\xbb\xbf" + json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize("innermost", [b"[]", b"[1]", b"{}"])
def test_200_levels_of_nesting_are_read(innermost: bytes) -> None:
    raw = b"[" * 199 + innermost + b"]" * 199
    assert parse(raw) == json.loads(raw)


def test_an_error_in_a_large_body_is_explained_quickly() -> None:
    """After two million bytes of the worst kind: the time is linear, not quadratic."""
    for filling in (b"1e100,", b"9" * 308 + b",", b'"x",', b"[],"):
        started = time.process_time()
        with pytest.raises(ApiError):
            parse(b"[" + filling * (2_000_000 // len(filling)) + b"NaN]")
        assert time.process_time() - started < 20


PLACES = [
    ("/v1/completions", {"prompt": LONE}, "prompt"),
    ("/v1/completions", {"prompt": ["a", LONE]}, "prompt[1]"),
    ("/v1/completions", {**PROMPT, "stop": LONE}, "stop"),
    ("/v1/completions", {**PROMPT, "stop": ["a", LONE]}, "stop[1]"),
    ("/v1/completions", {**PROMPT, "bad_words": [LONE]}, "bad_words[0]"),
    ("/v1/completions", {**PROMPT, "model": LONE}, "model"),
    ("/v1/completions", {**PROMPT, "user": LONE}, "user"),
    ("/v1/completions", {**PROMPT, "suffix": LONE}, "suffix"),
    ("/v1/completions", {**PROMPT, LONE: 1}, None),
    ("/v1/completions", {**PROMPT, "logit_bias": {LONE: 1}}, "logit_bias"),
    ("/v1/completions", {**PROMPT, "guided_regex": LONE}, "guided_regex"),
    ("/v1/completions", {**PROMPT, "guided_grammar": f'start: "{LONE}"'}, "guided_grammar"),
    ("/v1/completions", {**PROMPT, "guided_choice": [LONE]}, "guided_choice[0]"),
    ("/v1/completions", {**PROMPT, "guided_json": {"const": LONE}}, "guided_json.const"),
    ("/v1/completions", {**PROMPT, "guided_json": {"properties": {LONE: {}}}}, "guided_json.properties"),
    ("/v1/completions", {**PROMPT, "structured_outputs": {"regex": LONE}}, "structured_outputs.regex"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONE}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{"role": LONE, "content": "a"}]}, "messages[0].role"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]},
        "messages[0].content[0].text",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", LONE: 1}]}, "messages[0]"),
    (
        "/v1/chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": {"name": LONE}}]},
        "tools[0].function.name",
    ),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": LONE}}, "chat_template_kwargs.a"),
    ("/tokenize", {"prompt": LONE}, "prompt"),
    ("/detokenize", {"tokens": [LONE]}, "tokens[0]"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), PLACES, ids=[str(place[1])[:60].encode("ascii", "replace").decode() for place in PLACES]
)
def test_a_lone_surrogate_is_refused_anywhere(server: Running, path: str, body: Any, param: str | None) -> None:
    answer = server.post_raw(path, json.dumps(body).encode(), headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "lone surrogate \\ud800" in error["message"]


def test_call_arguments_may_have_a_lone_surrogate_but_schemas_may_not(server: Running) -> None:
    """Arguments that a model wrote are passed on unchanged; a schema in a string is parsed."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800", "b": NaN}'}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert server.post("/v1/chat/completions", {**CHAT, "messages": messages}).status_code == 200
    for schema in ('{"const": "\\ud800"}', '{"const": NaN}', '{"maximum": ' + "9" * 5000 + "}"):
        answer = server.post("/v1/completions", {**PROMPT, "guided_json": schema})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "guided_json"


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "deflate, gzip"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_compressed_body_is_refused_as_such(server: Running, coding: str, path: str) -> None:
    raw = gzip.compress(json.dumps(PROMPT).encode())
    answer = server.post_raw(path, raw, headers={**JSON, "content-encoding": coding})
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"
    assert "compressed" in answer.json()["error"]["message"]


def test_content_encoding_identity_is_accepted(server: Running) -> None:
    answer = server.post("/v1/completions", PROMPT, headers={"content-encoding": "identity"})
    assert answer.status_code == 200
    assert server.get("/health", headers={"content-encoding": "gzip"}).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "1"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "image"},
    ],
    ids=lambda part: str(part["type"]),
)
def test_message_parts_that_are_not_text_are_refused_by_type(server: Running, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[1].type"
    assert repr(part["type"]) in error["message"]
    assert "text only" in error["message"]


HUGE = 10**30


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "n",
        "top_k",
        "seed",
        "min_tokens",
        "logprobs",
        "prompt_logprobs",
        "best_of",
        "speculative_tokens",
        "temperature",
        "frequency_penalty",
        "repetition_penalty",
        "top_p",
        "min_p",
    ],
)
@pytest.mark.parametrize("value", [HUGE, -HUGE, 10**4000], ids=["large", "negative", "enormous"])
def test_huge_numbers_are_accepted_or_refused_by_field(server: Running, name: str, value: int) -> None:
    answer = server.post("/v1/completions", {**PROMPT, name: value})
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert name in (error["param"] or error["message"])
        assert "JSON" not in error["message"]
        assert len(error["message"]) < 500
    server.wait_until_idle()
