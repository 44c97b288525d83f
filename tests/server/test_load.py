"""Many clients at once, some of which disconnect: the others get the texts that they get alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from foredraft import LLM, SamplingParams
from foredraft.engine.proposal import Proposal
from foredraft.sampling import Sampler
from foredraft.verify import verify
from tests.server.conftest import running

PROMPTS = ("Once upon a time", "def area(width, height):", "One day, a little cat", "import json\n")
LENGTHS = (4, 24, 60)


def test_texts_do_not_depend_on_other_clients(llm: LLM) -> None:
    asked = [(prompt, length) for prompt in PROMPTS for length in LENGTHS]
    params = [SamplingParams(max_tokens=length, temperature=0) for _, length in asked]
    outputs = llm.generate([prompt for prompt, _ in asked], params)
    expected = {key: output.outputs[0].text for key, output in zip(asked, outputs, strict=True)}
    rng = random.Random(0)
    finished: list[tuple[tuple[str, int], str]] = []

    async def one(client: openai.AsyncOpenAI) -> None:
        for _ in range(6):
            key = rng.choice(asked)
            cut_after = rng.randrange(6) if rng.random() < 1 / 3 else None
            settings: dict[str, Any] = {"model": "pair", "prompt": key[0], "max_tokens": key[1], "temperature": 0}
            text = ""
            stream = await client.completions.create(**settings, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].text
                if cut_after == 0:
                    break
                cut_after = None if cut_after is None else cut_after - 1
            else:
                finished.append((key, text))
            await stream.close()

    async def main(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(*(one(client) for _ in range(16)))

    with running(llm) as server:
        asyncio.run(main(server.url))
        server.wait_until_idle()
    assert len(finished) > 30
    if llm.target.traits.row_exact:  # otherwise only up to near ties
        assert all(text == expected[key] for key, text in finished)


def test_an_error_of_one_request_in_the_engine_gives_only_that_request_a_500(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen other requests get the texts that they get without it."""
    expected = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, temperature=0))[0].outputs[0].text

    def faulty(logits: Any, proposal: Proposal, samplers: Sequence[Sampler], *args: Any, **kwargs: Any) -> Any:
        if any(sampler.params.top_k == 3 for sampler in samplers):
            raise RuntimeError("injected")
        return verify(logits, proposal, samplers, *args, **kwargs)

    async def main(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            settings: dict[str, Any] = {"model": "pair", "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
            bad = client.completions.create(**settings, extra_body={"top_k": 3})
            good = [client.completions.create(**settings) for _ in range(16)]
            return await asyncio.gather(bad, *good, return_exceptions=True)

    monkeypatch.setattr(llm.engine, "_verifier", faulty)
    with running(llm) as server:
        bad, *good = asyncio.run(main(server.url))
        server.wait_until_idle()
    assert isinstance(bad, openai.InternalServerError)
    assert "injected" not in str(bad)  # the details are only logged
    assert {answer.choices[0].text for answer in good} == {expected}
