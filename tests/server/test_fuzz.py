"""Randomly mutated bodies, with extreme numbers, surrogates, nesting and types: every error says what is wrong."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from foredraft import LLM
from foredraft.server import RequestLimits
from tests.server.conftest import SETTINGS, Running, running

CONTROL = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
COMMON: dict[str, Any] = {
    "model": "pair",
    "n": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "repetition_penalty": 1.1,
    "seed": 1,
    "stop": ["x", "yz"],
    "stop_token_ids": [7],
    "bad_words": ["bad"],
    "logit_bias": {"5": -1},
    "min_tokens": 1,
    "max_tokens": 3,
    "prompt_logprobs": 1,
    "speculative_tokens": 2,
    "user": "somebody",
    "ignore_eos": True,
    "stream": False,
    "metrics": False,
}
FORMS: list[dict[str, Any]] = [
    {},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"guided_regex": "[a-c]{1,3}"},
    {"guided_choice": ["a", "b"]},
    {"guided_grammar": 'start: "a" | "b"'},
    {"structured_outputs": {"regex": "a+"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
]
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "1"},
    {"role": "user", "content": "and now?"},
]
CHAT = {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"a": 1}, "top_logprobs": 2, "logprobs": True}
NEWER = {"allowed_token_ids": list(range(3, 200)), "priority": 1, "stream_options": None, "tool_choice": "auto"}
ITEMS = [
    {"role": "user", "content": "hello"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": []}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "1", "output": "1"},
]
RESPONSE: dict[str, Any] = {
    "model": "pair",
    "instructions": "be brief",
    "max_output_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "store": False,
    "metadata": {"a": "b"},
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}],
}
FORMAT = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": prompt, **COMMON, **form} for prompt in ("Once", ["a", "b"], [[1, 2]]) for form in FORMS
    ],
    "/v1/chat/completions": [{**CHAT, **COMMON, **form} for form in (*FORMS, NEWER)],
    "/v1/responses": [
        {"input": given, **RESPONSE, **form} for given in ("hello", ITEMS) for form in ({}, {"text": FORMAT})
    ],
    "/tokenize": [{"prompt": "Once", "add_special_tokens": True}, {"messages": MESSAGES, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}


def nested(depth: int, kind: str) -> str:
    return {"list": "[" * depth + "]" * depth, "dict": '{"a":' * depth + "1" + "}" * depth}[kind]


class Raw(str):
    """JSON text that is inserted unchanged into a body."""


NUMBERS: list[Any] = [
    0, -1, 1, -0.0, 0.1, 1e-320, 1e308, -1e308, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, -(10**30),
    10**400, 10**4200, *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-" + "9" * 5000, "1.0", "1E400", "01", "+1", ".5")),
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "\x00", "\ud800", "a\udfff", "\udc00\ud800", "\ud83d\ude00", "\ufffe", "\u202e", "é" * 50, "a" * 1001, "x" * 5000, "[", "(", "\\", "(a*)*b", "[\ud800]", "^$",
    "<|endoftext|>", "{{ messages }}", "{% raise %}", '{"a": "\\ud800"}', '{"a": NaN}', "[" * 1000, "../../etc/passwd", "pair", "null", "-1",
]  # fmt: skip
OTHERS: list[Any] = [
    None, True, False, [], {}, [None], [[]], [{}], {"": None}, {"\ud800": 1}, {"a": {"\udfff": 1}}, ["\ud800"], [0] * 2000, ["a"] * 200,
    *(Raw(nested(depth, kind)) for depth in (20, 150, 250, 5000) for kind in ("list", "dict")),
]  # fmt: skip
VALUES = [*NUMBERS, *TEXTS, *OTHERS]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a body."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in members:
        yield (*path, name)
        yield from places(one, (*path, name))


def mutated(body: Any, rng: random.Random) -> Any:
    """A copy of a body with one to three changes."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(body))
        if not found:
            break
        *way, last = rng.choice(found)
        holder = body
        for step in way:
            holder = holder[step]
        change(holder, last, rng)
    return body


def change(holder: Any, last: Any, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.75:
        holder[last] = rng.choice(VALUES)
    elif kind < 0.85:
        del holder[last]
    elif isinstance(holder, dict):
        name = rng.choice([one for one in TEXTS if len(one) < 100])
        holder[name] = holder.pop(last) if kind < 0.93 else rng.choice(VALUES)
    else:
        holder.extend([holder[last]] * rng.choice((1, 300)))


def written(value: Any) -> bytes:
    """A body as JSON, with raw parts unchanged."""
    raws: list[str] = []

    def put(one: Any) -> Any:
        if isinstance(one, Raw):
            raws.append(str(one))
            return f"\x01{len(raws) - 1}\x01"
        if isinstance(one, dict):
            return {name: put(member) for name, member in one.items()}
        return [put(member) for member in one] if isinstance(one, list) else one

    text = json.dumps(put(value))
    for place, raw in enumerate(raws):
        text = text.replace(f'"\\u0001{place}\\u0001"', raw)
    return text.encode()


def garbled(raw: bytes, rng: random.Random) -> bytes:
    """The bytes, in some cases also cut, changed or repeated."""
    if not raw or rng.random() > 0.05:
        return raw
    place = rng.randrange(len(raw))
    how: Callable[[], bytes] = rng.choice(
        (
            lambda: raw[:place],
            lambda: raw[:place] + bytes([rng.randrange(256)]) + raw[place + 1 :],
            lambda: raw + raw[:place],
        )
    )
    return how()


def assert_explained(answer: httpx2.Response) -> None:
    """Assert that an answer is a 200, or an error in OpenAI's form with a message of one readable line."""
    if answer.status_code == 200:
        return
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 10 < len(error["message"]) < 1000
    assert error["message"].isprintable()


@pytest.mark.slow
def test_two_thousand_mutated_bodies_get_explained_answers(llm: LLM) -> None:
    rng = random.Random(17)
    settings = replace(SETTINGS, limits=RequestLimits(request_seconds=5.0))
    seen: Counter[int] = Counter()
    with running(llm, settings) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        before = control(server)
        for number in range(2000):
            path = rng.choice(list(SEEDS))
            raw = garbled(written(mutated(rng.choice(SEEDS[path]), rng)), rng)
            answer = client.post(path, content=raw, headers={"content-type": "application/json"})
            seen[answer.status_code] += 1
            try:
                assert_explained(answer)
            except Exception as error:
                raise AssertionError(f"body {number} to {path}: {raw[:600]!r}: {answer.text[:600]}") from error
        server.wait_until_idle()
        assert server.get("/health").status_code == 200
        assert control(server) == before
    assert seen[200] > 100  # some bodies are still valid
    assert seen[400] > 500


def control(server: Running) -> Any:
    answer = server.post("/v1/completions", CONTROL)
    assert answer.status_code == 200
    return answer.json()["choices"]
