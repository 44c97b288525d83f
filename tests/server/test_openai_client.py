"""The official client, unchanged, against a server on a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from foredraft import LLM, RequestOutput, SamplingParams
from tests.server.conftest import TEMPLATE, Running

STORY = "Once upon a time, there was a little"
CODE = "def read_lines(path):"
MESSAGES: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell a story."}]


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def plain() -> LLM:
    """An engine without a server and without drafts."""
    return LLM(method="none")


def offline(plain: LLM, prompt: Any, max_tokens: int) -> RequestOutput:
    return plain.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0]


def test_a_completion_is_the_text_of_the_engine(client: openai.OpenAI, plain: LLM) -> None:
    answer = client.completions.create(model="pair", prompt=STORY, max_tokens=20, temperature=0)
    expected = offline(plain, STORY, max_tokens=20)
    assert answer.choices[0].text == expected.outputs[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 20
    assert answer.model == "pair"
    assert answer.object == "text_completion"


def test_a_streamed_completion_is_the_same_text(client: openai.OpenAI, plain: LLM) -> None:
    stream = client.completions.create(
        model="pair", prompt=STORY, max_tokens=30, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert (
        "".join(c.choices[0].text for c in chunks if c.choices) == offline(plain, STORY, max_tokens=30).outputs[0].text
    )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_several_prompts_may_have_several_texts_each(client: openai.OpenAI, server: Running) -> None:
    answer = client.completions.create(
        model="pair", prompt=[STORY, CODE], n=2, max_tokens=8, temperature=0.8, seed=3, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(STORY) for choice in answer.choices] == [True, True, False, False]
    assert answer.choices[2].text.startswith(CODE)
    assert answer.choices[0].text != answer.choices[1].text
    streamed = client.completions.create(
        model="pair", prompt=[STORY, CODE], n=2, max_tokens=8, temperature=0.8, seed=3, echo=True, stream=True
    )
    texts = ["", "", "", ""]
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_a_prompt_may_be_token_ids(client: openai.OpenAI, plain: LLM) -> None:
    ids = offline(plain, STORY, max_tokens=1).prompt_token_ids
    by_ids = client.completions.create(model="pair", prompt=ids, max_tokens=8, temperature=0, echo=True)
    by_text = client.completions.create(model="pair", prompt=STORY, max_tokens=8, temperature=0, echo=True)
    assert by_ids.choices[0].text == by_text.choices[0].text
    both = client.completions.create(model="pair", prompt=[ids, ids], max_tokens=8, temperature=0)
    assert len({choice.text for choice in both.choices}) == 1


def test_a_chat_gives_the_text_of_the_engine(client: openai.OpenAI, server: Running, plain: LLM) -> None:
    answer = client.chat.completions.create(model="pair", messages=MESSAGES, max_completion_tokens=12, temperature=0)
    ids = server.llm.chat_prompt(MESSAGES, chat_template=TEMPLATE)
    assert answer.choices[0].message.content == offline(plain, ids, max_tokens=12).outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


def test_a_streamed_chat_begins_with_its_role(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


def test_tools_reach_the_template(client: openai.OpenAI, server: Running) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    settings: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "max_tokens": 1}
    plain = client.chat.completions.create(**settings)
    with_tool = client.chat.completions.create(**settings, tools=[tool], tool_choice="auto")
    without = client.chat.completions.create(**settings, tools=[tool], tool_choice="none")
    assert plain.usage
    assert with_tool.usage
    assert without.usage
    assert with_tool.usage.prompt_tokens > plain.usage.prompt_tokens == without.usage.prompt_tokens


def test_a_completion_has_logprobs(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "pair", "prompt": STORY, "max_tokens": 6, "temperature": 0, "logprobs": 3}
    answer = client.completions.create(**settings)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.text_offset[0] == 0
    assert [found.text_offset[i] + len(found.tokens[i]) for i in range(5)] == found.text_offset[1:]
    assert found.token_logprobs is not None
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**settings, stream=True)]
    assert [token for one in streamed if one for token in one.tokens or ()] == found.tokens
    assert [offset for one in streamed if one for offset in one.text_offset or ()] == found.text_offset
    echoed = client.completions.create(**settings, echo=True).choices[0]
    assert echoed.logprobs is not None
    assert echoed.logprobs.tokens is not None
    assert echoed.logprobs.token_logprobs
    assert "".join(echoed.logprobs.tokens) == echoed.text == STORY + answer.choices[0].text
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.tokens[-6:] == found.tokens


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_index_the_text(client: openai.OpenAI, echo: bool) -> None:
    """Also with characters of several tokens, text that is held back for a stop string, and a hidden special token."""
    text, prompt = "Well 😀😀, ab, abx.", "é 😀: "
    settings: dict[str, Any] = {"model": "pair", "prompt": prompt, "max_tokens": 60, "temperature": 0, "logprobs": 0}
    settings |= {"stop": ["ab, abc"], "extra_body": {"guided_choice": [text]}}
    (choice,) = client.completions.create(**settings, echo=echo).choices
    assert choice.text == (prompt + text if echo else text)
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert len(tokens) == len(offsets)
    for token, begin in zip(tokens, offsets, strict=True):
        if "\ufffd" in token:
            assert choice.text[begin] in "é😀"
        elif token.startswith("<"):  # the end of the text
            assert begin == len(choice.text)
        else:
            assert choice.text.startswith(token, begin)
    assert "\ufffd" in "".join(tokens)
    assert max(offsets) == len(choice.text)
    if not echo:
        streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**settings, stream=True)]
        assert [offset for one in streamed if one for offset in one.text_offset or ()] == offsets


def test_a_chat_has_logprobs(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert "".join(entry.token for entry in found.content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in found.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in found.content)
    assert all(bytes(entry.bytes or ()).decode() == entry.token for entry in found.content)
    chunks = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content or ()]
    assert streamed == found.content


def test_bytes_of_parts_of_a_character_are_reported(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "pair", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    settings |= {"logprobs": True, "top_logprobs": 1, "extra_body": {"guided_choice": ["é 😀"]}}
    (choice,) = client.chat.completions.create(**settings).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "\ufffd" in "".join(entry.token for entry in choice.logprobs.content)
    joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert joined.decode().startswith("é 😀")


def test_stop_strings_end_a_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="pair", prompt=STORY, max_tokens=30, temperature=0).choices[0].text
    stop = whole.split()[4]
    cut = client.completions.create(model="pair", prompt=STORY, max_tokens=30, temperature=0, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].stop_reason == stop  # type: ignore[attr-defined]
    chunks = list(
        client.completions.create(model="pair", prompt=STORY, max_tokens=30, temperature=0, stop=stop, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text
    assert chunks[-1].choices[0].stop_reason == stop  # type: ignore[attr-defined]


def test_seed_and_logit_bias_are_honoured(client: openai.OpenAI) -> None:
    def text(**settings: Any) -> str:
        return client.completions.create(model="pair", prompt=STORY, max_tokens=12, **settings).choices[0].text

    assert text(seed=1, temperature=1.0) == text(seed=1, temperature=1.0)
    assert text(seed=1, temperature=1.0) != text(seed=2, temperature=1.0)
    assert len(set(text(temperature=0, logit_bias={"42": 100}))) < len(set(text(temperature=0)))


def test_extra_fields_are_honoured_and_metrics_returned(client: openai.OpenAI) -> None:
    extra = {"speculative_tokens": 3, "metrics": True, "top_k": 5, "ignore_eos": True, "return_token_ids": True}
    answer: Any = client.completions.create(model="pair", prompt=CODE, max_tokens=32, temperature=0, extra_body=extra)
    plain: Any = client.completions.create(
        model="pair", prompt=CODE, max_tokens=32, temperature=0, extra_body={**extra, "speculative_tokens": 0}
    )
    assert answer.choices[0].text == plain.choices[0].text
    assert len(answer.choices[0].token_ids) == 32
    assert answer.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0


def test_many_requests_at_once_get_the_same_text(server: Running, plain: LLM) -> None:
    expected = offline(plain, STORY, max_tokens=20).outputs[0].text

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def streamed() -> str:
                stream = await client.completions.create(
                    model="pair", prompt=STORY, max_tokens=20, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def whole() -> str:
                answer = await client.completions.create(model="pair", prompt=STORY, max_tokens=20, temperature=0)
                return answer.choices[0].text

            texts = await asyncio.gather(*(one() for _ in range(8) for one in (streamed, whole)))
            assert set(texts) == {expected}

    asyncio.run(main())
    server.wait_until_idle()


def test_the_model_is_listed(client: openai.OpenAI, server: Running) -> None:
    assert [model.id for model in client.models.list()] == ["pair", "other-name"]
    assert client.models.retrieve("other-name").root == "pair"  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt=STORY)


def test_unsupported_fields_are_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="pair", messages=MESSAGES, reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="pair", prompt=STORY, extra_body={"mirostat": 1})
    assert caught.value.param == "mirostat"
