"""vLLM's extra fields, used through the openai client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from foredraft import LLM, SamplingParams
from tests.server.conftest import SETTINGS, TEMPLATE, Running, running

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone() -> LLM:
    """An engine beside the server's, which belongs to the server's thread."""
    return LLM(seed=0)


# --- max_tokens 0 -------------------------------------------------------------------------------------------------


def test_a_prompt_can_be_scored_without_generating(client: openai.OpenAI, alone: LLM) -> None:
    scored = client.completions.create(model="pair", prompt=PROMPT, max_tokens=0, echo=True, logprobs=2)
    (choice,) = scored.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    assert scored.usage is not None
    assert (scored.usage.completion_tokens, scored.usage.total_tokens) == (0, scored.usage.prompt_tokens)
    written = client.completions.create(model="pair", prompt=PROMPT, max_tokens=1, echo=True, logprobs=2, temperature=0)
    expected = written.choices[0].logprobs
    assert expected is not None
    assert choice.logprobs.token_logprobs == expected.token_logprobs[:-1]  # type: ignore[index]
    assert choice.logprobs.tokens == expected.tokens[:-1]  # type: ignore[index]
    assert choice.logprobs.text_offset == expected.text_offset[:-1]  # type: ignore[index]
    (output,) = alone.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    own = [next(iter(one.values())).logprob for one in output.prompt_logprobs if one]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(own)  # type: ignore[index]


@pytest.mark.parametrize("text", ["hello 😀😀", "😀", "hello there"])
@pytest.mark.parametrize("has_bos", [True, False])
def test_the_first_token_of_a_scored_prompt_is_not_a_part_of_the_others(
    client: openai.OpenAI, alone: LLM, text: str, has_bos: bool
) -> None:
    """Several tokens make one character, and each of them decodes to a whole replacement character."""
    assert alone.text_tokenizer is not None
    ids = alone.text_tokenizer(text)["input_ids"]
    prompt = ids if has_bos else ids[1:]
    (scored,) = client.completions.create(model="pair", prompt=prompt, max_tokens=0, echo=True, logprobs=0).choices
    assert scored.logprobs is not None
    tokens = scored.logprobs.tokens
    assert tokens is not None
    whole = "".join(itertools.takewhile(lambda token: "\ufffd" not in token, tokens[1:]))
    assert scored.text == text
    assert text.startswith(tokens[0] + whole)
    assert (tokens[0] == "") == (has_bos or text == "😀")


def test_several_prompts_streams_and_ids_can_be_scored_too(client: openai.OpenAI, server: Running) -> None:
    answer = client.completions.create(model="pair", prompt=[PROMPT, "Another one"], max_tokens=0, echo=True)
    assert [choice.text for choice in answer.choices] == [PROMPT, "Another one"]
    stream = client.completions.create(model="pair", prompt=PROMPT, max_tokens=0, echo=True, stream=True)
    chunks = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(choice.text for choice in chunks) == PROMPT
    assert chunks[-1].finish_reason == "length"
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "prompt_logprobs": 1, "metrics": True}
    found = server.post("/v1/completions", body).json()
    assert found["choices"][0]["text"] == ""
    assert [one is None for one in found["choices"][0]["prompt_logprobs"]] == [True, False, False]
    assert found["metrics"]["time_to_first_token"] is None


def test_max_tokens_0_without_anything_to_return_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens 0 generates nothing"):
        client.completions.create(model="pair", prompt=PROMPT, max_tokens=0)


# --- usage in every chunk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [False, True])
def test_usage_grows_with_the_chunks_of_completions(client: openai.OpenAI, include: bool) -> None:
    options: Any = {"continuous_usage_stats": True, "include_usage": include}
    settings: Any = {"max_tokens": 12, "temperature": 0, "stream": True, "stream_options": options, "n": 2}
    chunks = list(client.completions.create(model="pair", prompt=[PROMPT, "def mean(values):"], **settings))
    usages = [chunk.usage for chunk in chunks]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 48
    prompts = {usage.prompt_tokens for usage in usages if usage is not None}
    assert len(prompts) == 1
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages if usage)
    assert (chunks[-1].choices == []) == include
    if include:
        assert usages[-1] == usages[-2]


def test_usage_grows_with_the_chunks_of_chats(client: openai.OpenAI) -> None:
    settings: Any = {
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    messages: Any = [{"role": "user", "content": "Hello"}]
    counts = [
        chunk.usage.completion_tokens
        for chunk in client.chat.completions.create(model="pair", messages=messages, **settings)
        if chunk.usage is not None
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 12


# --- return_token_ids ---------------------------------------------------------------------------------------------


def events_of(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    text = server.post(path, {**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def test_the_first_chunk_of_each_completion_has_the_ids_of_its_prompt(server: Running) -> None:
    body = {"prompt": [PROMPT, "Another one"], "n": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    whole = server.post("/v1/completions", body).json()["choices"]
    events = events_of(server, "/v1/completions", body)
    for choice in whole:
        own = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not any("prompt_token_ids" in one for one in own[1:])


def test_the_first_chunk_of_each_chat_has_the_ids_of_its_prompt(server: Running) -> None:
    body = {"messages": TALK[:1], "n": 2, "max_tokens": 4, "temperature": 0}
    whole = server.post("/v1/chat/completions", {**body, "return_token_ids": True}).json()
    events = events_of(server, "/v1/chat/completions", {**body, "return_token_ids": True})
    for index in range(2):
        own = [event for event in events if event["choices"][0]["index"] == index]
        assert own[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in event for event in own[1:])
    assert not any("prompt_token_ids" in event for event in events_of(server, "/v1/chat/completions", body))


# --- allowed_token_ids --------------------------------------------------------------------------------------------


def test_only_allowed_ids_are_written(client: openai.OpenAI) -> None:
    allowed = list(range(300, 340))
    for settings in ({"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 1}):
        answer = client.completions.create(
            model="pair",
            prompt=PROMPT,
            max_tokens=20,
            extra_body={"allowed_token_ids": allowed, "return_token_ids": True},
            **settings,  # type: ignore[arg-type]
        )
        ids = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
        assert len(ids) == 20
        assert set(ids) <= set(allowed)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([], "at least 1"), ([-1], "greater"), ([10**7], "valid ids are 0 to"), ([1] * 16385, "at most 16384")],
)
def test_bad_allowed_ids_are_refused_by_name(client: openai.OpenAI, ids: list[int], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.completions.create(model="pair", prompt=PROMPT, extra_body={"allowed_token_ids": ids})
    assert str(caught.value.param).startswith("allowed_token_ids")


# --- chat templates -----------------------------------------------------------------------------------------------

TALK: Any = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Once upon a time"}]


def test_the_final_message_can_be_continued(client: openai.OpenAI, server: Running, alone: LLM) -> None:
    body = {"messages": TALK, "continue_final_message": True}
    ids = server.post("/tokenize", body).json()["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("assistant: Once upon a time")
    answer = client.chat.completions.create(
        model="pair", messages=TALK, max_tokens=10, temperature=0, extra_body={"continue_final_message": True}
    )
    params = SamplingParams(max_tokens=10, temperature=0)
    (expected,) = alone.generate([ids], params)  # type: ignore[list-item]
    assert answer.choices[0].message.content == expected.outputs[0].text
    (said,) = alone.chat(TALK, params, chat_template=TEMPLATE, continue_final_message=True)
    assert said.prompt_token_ids == ids
    assert said.outputs[0].text == expected.outputs[0].text


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        (TALK, {"add_generation_prompt": True}, "mutually exclusive"),
        (TALK[:1], {}, "to be the assistant's"),
        ([*TALK[:1], {"role": "assistant", "content": ""}], {}, "with content"),
        (TALK, {"chat_template_kwargs": {"continue_final_message": True}}, "must not contain"),
    ],
)
def test_an_impossible_continuation_is_refused(client: openai.OpenAI, messages: Any, more: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(
            model="pair", messages=messages, extra_body={"continue_final_message": True, **more}
        )


@pytest.fixture(scope="module")
def trusting(alone: LLM) -> Iterator[Running]:
    with running(alone, replace(SETTINGS, trust_request_chat_template=True)) as found:
        yield found


def test_a_chat_template_in_a_request_is_refused(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template") as caught:
        client.chat.completions.create(model="pair", messages=TALK, extra_body={"chat_template": "x"})
    assert caught.value.param == "chat_template"
    assert server.post("/tokenize", {"messages": TALK, "chat_template": "x"}).status_code == 400
    hidden = {"messages": TALK, "chat_template_kwargs": {"chat_template": "x"}}
    assert server.post("/v1/chat/completions", hidden).status_code == 400


def test_a_chat_template_in_a_request_is_used_if_trusted(trusting: Running) -> None:
    template = "{{ messages[0].content }}!"
    ids = trusting.post("/tokenize", {"messages": TALK, "chat_template": template}).json()["tokens"]
    assert trusting.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("Say it!")
    body = {"messages": TALK, "max_tokens": 4, "chat_template": "{{ nothing.at.all }}"}
    answer = trusting.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "template" in answer.json()["error"]["message"]
    assert trusting.post("/v1/chat/completions", {**body, "chat_template": template}).status_code == 200


def test_the_document_has_vllms_fields(server: Running) -> None:
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"]
    assert {"allowed_token_ids", "priority", "continue_final_message", "chat_template"} <= fields.keys()
    assert "maxItems" in json.dumps(fields["allowed_token_ids"])
    assert "continuous_usage_stats" in schemas["StreamOptions"]["properties"]
