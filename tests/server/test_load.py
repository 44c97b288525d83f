"""Many clients at once, some of which go away: the others' texts are what they would be alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai

from foredraft import LLM, SamplingParams
from tests.server.conftest import running

PROMPTS = ("Once upon a time", "def area(width, height):", "One day, a little cat", "import json\n")
LENGTHS = (4, 24, 60)


def test_texts_do_not_depend_on_who_else_is_there(llm: LLM) -> None:
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
    if llm.target.traits.row_exact:  # elsewhere only up to near ties
        assert all(text == expected[key] for key, text in finished)
