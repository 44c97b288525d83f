"""The asyncio engine, as its users meet it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from torch import Tensor

from foredraft import LLM, AsyncLLM, ForedraftError, RequestError, SamplingParams

STORY = "Once upon a time, there was a little"
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(seed=0)


def run(llm: LLM, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Run a coroutine over an engine of its own thread; afterwards nothing is left in it."""

    async def main() -> None:
        async with AsyncLLM(llm=llm) as engine:
            await asyncio.wait_for(body(engine), timeout=120)

    asyncio.run(main())
    assert not llm.engine.has_work
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def test_many_at_once_give_what_one_gives(llm: LLM) -> None:
    expected = llm.generate(STORY, GREEDY)[0].outputs[0].text

    async def body(engine: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(engine.generate(STORY, GREEDY) for _ in range(8)))
        assert {output.outputs[0].text for output in outputs} == {expected}
        assert len({output.request_id for output in outputs}) == 8

    run(llm, body)


def test_a_stream_that_is_left_and_a_task_that_is_cancelled_disturb_nobody(llm: LLM) -> None:
    expected = llm.generate(STORY, GREEDY)[0].outputs[0].text
    long = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)

    async def first_of(stream: AsyncIterator[object]) -> object:
        async for delta in stream:
            return delta
        return None

    async def body(engine: AsyncLLM) -> None:
        cancelled = asyncio.create_task(engine.generate("def f(x):", long))
        assert await first_of(engine.stream(STORY, long)) is not None
        kept = asyncio.create_task(engine.generate(STORY, GREEDY))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await kept).outputs[0].text == expected

    run(llm, body)


def test_bad_requests_fail_alone(llm: LLM) -> None:
    def broken(prefix: list[int], logits: Tensor) -> Tensor:
        raise ValueError("no")

    async def body(engine: AsyncLLM) -> None:
        bad = SamplingParams(max_tokens=4, logits_processors=[broken])
        results = await asyncio.gather(
            engine.generate(""),
            engine.generate(STORY, bad),
            engine.generate(STORY, GREEDY),
            engine.generate(STORY, SamplingParams(bad_words=["\ud800"])),
            return_exceptions=True,
        )
        assert isinstance(results[3], ForedraftError)
        assert isinstance(results[0], ForedraftError)
        assert isinstance(results[1], RequestError)
        assert "broken raised ValueError: no" in str(results[1])
        assert not isinstance(results[2], BaseException)

    run(llm, body)


def test_shutdown_ends_what_runs_and_refuses_what_comes(llm: LLM) -> None:
    async def main() -> None:
        engine = AsyncLLM(llm=llm)
        running = asyncio.create_task(engine.generate(STORY, SamplingParams(max_tokens=1500, ignore_eos=True)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(ForedraftError, match="shut down"):
            await running
        with pytest.raises(ForedraftError, match="shut down"):
            await engine.generate(STORY)
        engine.shutdown()

    asyncio.run(main())
    assert not llm.engine.has_work
