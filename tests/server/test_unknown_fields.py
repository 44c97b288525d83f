"""Undocumented fields that clients send: parts of earlier answers, nulls, and fields of other servers."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from foredraft import LLM
from foredraft.server.request_log import JsonLinesHandler
from tests.server.conftest import SETTINGS, Running, running, wait_for

HEADER = "X-Foredraft-Ignored"
USER: dict[str, Any] = {"role": "user", "content": "Tell a story."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def strict(llm: LLM) -> Iterator[Running]:
    with running(llm, replace(SETTINGS, strict=True)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(server: Running, messages: list[Any], **fields: Any) -> Any:
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0, **fields})


def test_a_conversation_with_model_dumps_works(client: openai.OpenAI) -> None:
    """Each answer is sent back as the client's own model_dump, as users do."""
    messages: list[Any] = [USER]
    for _ in range(4):
        raw = client.chat.completions.with_raw_response.create(
            model="pair", messages=messages, max_tokens=6, temperature=0
        )
        assert HEADER not in raw.headers
        dump = raw.parse().choices[0].message.model_dump()
        assert {"annotations", "audio", "function_call", "refusal", "tool_calls"} <= dump.keys()
        messages += [dump, {"role": "user", "content": "And then?"}]
    assert raw.parse().usage.prompt_tokens > 40  # type: ignore[union-attr]


LITELLM = {
    "content": "Once.",
    "role": "assistant",
    "tool_calls": None,
    "function_call": None,
    "provider_specific_fields": {"refusal": None, "citations": None},
    "reasoning_content": "I should begin.",
    "thinking_blocks": [{"type": "thinking", "thinking": "I should begin.", "signature": "x"}],
    "annotations": [],
    "audio": None,
    "images": [],
}
LITELLM_CALL = {
    "content": None,
    "role": "assistant",
    "tool_calls": [{**CALL, "index": 0, "provider_specific_fields": {"thought_signature": "x"}}],
    "function_call": None,
    "provider_specific_fields": None,
}
LANGCHAIN = {
    "role": "assistant",
    "content": [{"type": "text", "text": "Once."}],
    "additional_kwargs": {"refusal": None},
    "response_metadata": {"token_usage": {"total_tokens": 3}, "finish_reason": "stop"},
    "usage_metadata": {"input_tokens": 1},
    "invalid_tool_calls": [],
    "id": "run-1",
    "name": None,
    "tool_calls": [],
}
LANGCHAIN_CALL = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
PARSED = {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}, "refusal": None}
REFUSAL = {"role": "assistant", "content": None, "refusal": "I would rather not."}


@pytest.mark.parametrize(
    "answer",
    [LITELLM, LITELLM_CALL, LANGCHAIN, LANGCHAIN_CALL, PARSED, REFUSAL],
    ids=lambda one: "+".join(one)[-40:],
)
def test_fields_of_earlier_answers_are_accepted(server: Running, strict: Running, answer: dict[str, Any]) -> None:
    """In strict mode too; they change nothing."""
    history = [USER, answer, {"role": "tool", "content": "2", "tool_call_id": "call_1"}]
    kept = {name: value for name, value in answer.items() if name in ("role", "content", "tool_calls", "refusal")}
    bare = [USER, {name: value for name, value in kept.items() if value}, history[-1]]
    for one in (server, strict):
        found = chat(one, history, return_token_ids=True)
        assert found.status_code == 200, found.text
        assert HEADER not in found.headers
        assert found.json()["prompt_token_ids"] == chat(one, bare, return_token_ids=True).json()["prompt_token_ids"]


def test_a_refusal_replaces_missing_content(server: Running) -> None:
    said = {"role": "assistant", "content": "I would rather not."}
    texts = [chat(server, [USER, one], return_token_ids=True).json()["prompt_token_ids"] for one in (REFUSAL, said)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_reported_in_a_header(server: Running, stream: bool) -> None:
    user = {**USER, "mood": 1, "reasoning_content": "x", "cache_control": None}
    found = chat(server, [user], nonsense={"a": 1}, other=None, stream=stream)
    assert found.status_code == 200, found.text
    assert found.headers[HEADER] == "messages[0].mood, messages[0].reasoning_content, nonsense"
    assert found.headers["x-request-id"]


TOOL = {"name": "add", "parameters": {"type": "object"}}
CHAT_TOOLS = {"messages": [USER], "max_tokens": 4, "tools": [{"type": "function", "function": TOOL}]}
RESPONSES_TOOLS = {"input": "Tell a story.", "max_output_tokens": 4, "tools": [{"type": "function", **TOOL}]}
TOOL_BODIES = [
    ("/v1/chat/completions", CHAT_TOOLS),
    ("/v1/responses", RESPONSES_TOOLS),
    ("/tokenize", {name: value for name, value in CHAT_TOOLS.items() if name != "max_tokens"}),
]


@pytest.fixture(scope="module")
def without_tools(llm: LLM) -> Iterator[Running]:
    """A server whose chat template does not show tools."""
    with running(llm, replace(SETTINGS, chat_template="{{ messages[0].content }}")) as found:
        yield found


@pytest.mark.parametrize(("path", "body"), TOOL_BODIES)
def test_tools_are_reported_where_the_template_ignores_them(
    server: Running, without_tools: Running, path: str, body: Any
) -> None:
    ignored = without_tools.post(path, {**body, "typo": 1})
    assert ignored.status_code == 200, ignored.text
    assert ignored.headers[HEADER] == "tools, typo"
    assert HEADER not in without_tools.post(path, {**body, "tools": []}).headers
    assert HEADER not in server.post(path, body).headers


@pytest.mark.parametrize(("path", "body"), TOOL_BODIES[:2])
@pytest.mark.parametrize("choice", ["none", "required"])
def test_tools_are_honoured_where_the_choice_needs_no_template(
    without_tools: Running, path: str, body: Any, choice: str
) -> None:
    assert HEADER not in without_tools.post(path, {**body, "tool_choice": choice}).headers


def test_tools_are_honoured_where_calls_are_parsed(llm: LLM) -> None:
    settings = replace(SETTINGS, chat_template="{{ messages[0].content }}", tool_call_parser="hermes")
    with running(llm, settings) as server:
        assert HEADER not in server.post("/v1/chat/completions", CHAT_TOOLS).headers


def test_strict_mode_refuses_tools_that_the_template_ignores(llm: LLM) -> None:
    settings = replace(SETTINGS, chat_template="{{ messages[0].content }}", strict=True)
    with running(llm, settings) as server:
        found = server.post("/v1/chat/completions", CHAT_TOOLS)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "tools"
    assert "this model has no use for it" in found.json()["error"]["message"]


def test_unknown_fields_are_logged(server: Running) -> None:
    stream = io.StringIO()
    handler, logger = JsonLinesHandler(stream), logging.getLogger("foredraft")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        server.post(
            "/v1/completions",
            {"prompt": "Once", "max_tokens": 2, "typo": 1, "stream_options": {"a": 1}, "stream": True},
        )
        server.post("/tokenize", {"prompt": "Once", "typo": 1, "a secret": 1})
        wait_for(lambda: stream.getvalue().count("typo") == 2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    found = [json.loads(line).get("ignored") for line in stream.getvalue().splitlines() if "typo" in line]
    assert found == [["stream_options.a", "typo"], ["typo", "?"]]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_field_names_are_escaped_in_the_header(server: Running, path: str) -> None:
    names = {"a\r\nSet-Cookie: x": 1, "ü, b": 1, "x" * 500: 1}
    raw = json.dumps({"prompt": "Once", **names}).encode()
    found = post_raw(server, path, raw)
    assert found.status_code == 200, found.text
    assert "set-cookie" not in found.headers
    assert found.headers[HEADER].split(", ") == ["a%0D%0ASet-Cookie%3A%20x", "%C3%BC%2C%20b", "x" * 100]


@pytest.mark.parametrize(("name", "shown"), [("", '""'), (" ", "%20"), ("\t", "%09"), ("a ", "a%20")])
def test_blanks_in_a_field_name_are_escaped_in_the_header(server: Running, name: str, shown: str) -> None:
    """A header must not end with a blank."""
    found = post_raw(server, "/v1/completions", json.dumps({"prompt": "Once", "x": 1, name: 1}).encode())
    assert found.status_code == 200, found.text
    assert found.headers[HEADER] == f"x, {shown}"


def test_the_number_of_reported_names_is_limited(server: Running) -> None:
    raw = json.dumps({"prompt": "Once", **{f"f{i}": 1 for i in range(50_000)}}).encode()
    found = post_raw(server, "/v1/completions", raw)
    assert found.status_code == 200
    assert found.headers[HEADER].split(", ") == [*(f"f{i}" for i in range(16)), "..."]


def post_raw(server: Running, path: str, raw: bytes) -> Any:
    return server.post_raw(path, raw, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": [{**USER, "mood": 1}]}, "messages[0].mood"),
        ("/v1/chat/completions", {"messages": [{**USER, "refusal": "x"}]}, "messages[0].refusal"),
        ("/v1/completions", {"prompt": "Once", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"prompt": "Once", "nonsense": 1}, "nonsense"),
        ("/detokenize", {"tokens": [1], "nonsense": 1}, "nonsense"),
    ],
)
def test_strict_mode_refuses_unknown_fields_by_name(strict: Running, path: str, body: Any, name: str) -> None:
    found = strict.post(path, body)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == name
    assert "no such field" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "neutral", "asking"),
    [
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 2.0),
        ("top_n_sigma", -1, 1.5),
        ("mirostat", 0, 2),
        ("repeat_penalty", 1, 1.2),
        ("truncate_prompt_tokens", None, 5),
        ("n_predict", -1, 5),
        ("max_new_tokens", None, 5),
        ("cache_salt", None, "x"),
    ],
)
def test_unsupported_fields_that_affect_the_text_are_refused_unless_neutral(
    server: Running, strict: Running, field: str, neutral: Any, asking: Any
) -> None:
    for one in (server, strict):
        found = chat(one, [USER], **{field: neutral})
        assert found.status_code == 200, found.text
        assert HEADER not in found.headers
        refused = chat(one, [USER], **{field: asking})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field


def test_the_document_says_whether_unknown_fields_are_accepted(server: Running, strict: Running) -> None:
    for one, expected in ((server, True), (strict, False)):
        schemas = one.get("/openapi.json").json()["components"]["schemas"]
        for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest", "Message", "Tool"):
            assert schemas[name]["additionalProperties"] is expected
