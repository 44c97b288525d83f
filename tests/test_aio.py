"""The asyncio engine, through its public API."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from foredraft import LLM, AsyncLLM, ForedraftError, RequestError, SamplingParams
from foredraft.engine.proposal import Proposal
from foredraft.engine.step import Step
from foredraft.model import LanguageModel
from foredraft.sampling import Sampler
from foredraft.text.outputs import Delta, RequestOutput
from foredraft.text.request import Request
from foredraft.text.stream import TextStream

STORY = "Once upon a time, there was a little"
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(seed=0)


@pytest.fixture(autouse=True, params=[False, True], ids=["in step", "while the device computes"])
def runs_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether deltas are sent while the target computes the next step. The CPU is made to count as asynchronous for this."""
    monkeypatch.setattr(LanguageModel, "runs_ahead", request.param)
    return bool(request.param)


def run(llm: LLM, body: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Run a coroutine with an AsyncLLM, and assert that nothing is left in the engine afterwards."""

    async def main() -> None:
        async with AsyncLLM(llm=llm) as engine:
            await asyncio.wait_for(body(engine), timeout=120)

    asyncio.run(main())
    assert not llm.engine.has_work
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def test_concurrent_requests_give_the_text_of_a_single_request(llm: LLM) -> None:
    expected = llm.generate(STORY, GREEDY)[0].outputs[0].text

    async def body(engine: AsyncLLM) -> None:
        outputs = await asyncio.gather(*(engine.generate(STORY, GREEDY) for _ in range(8)))
        assert {output.outputs[0].text for output in outputs} == {expected}
        assert len({output.request_id for output in outputs}) == 8

    run(llm, body)


def test_a_finished_text_arrives_though_all_other_work_is_cancelled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas may be sent during the next step, but here the step that finishes the text is the last one."""
    long = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
    step, cancelled = llm.engine.step, threading.Event()

    async def body(engine: AsyncLLM) -> None:
        short = await engine.prepare(STORY, SamplingParams(max_tokens=3, temperature=0.0))
        other = asyncio.create_task(engine.generate("def f(x):", long))
        other.add_done_callback(lambda _: cancelled.set())
        loop = asyncio.get_running_loop()

        def step_then_cancel(*args: Any) -> None:
            step(*args)
            if short.is_finished and not cancelled.is_set():
                loop.call_soon_threadsafe(other.cancel)
                assert cancelled.wait(30)

        monkeypatch.setattr(llm.engine, "step", step_then_cancel)
        batches = [batch async for batch in engine.follow([short])]
        assert batches[-1][-1][1].output is not None
        with pytest.raises(asyncio.CancelledError):
            await other

    run(llm, body)


def test_a_closed_stream_and_a_cancelled_task_do_not_affect_others(llm: LLM) -> None:
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


@pytest.mark.parametrize("place", ["verification", "stop rule", "text"])
def test_an_error_in_one_request_ends_only_that_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The error is raised in verification, in the stop rule or while the text is made. Sixteen other requests finish."""
    raised = KeyError("injected")
    seeded = SamplingParams(max_tokens=20, temperature=0.9, seed=5)
    wanted = [GREEDY, seeded] * 8
    expected = [output.outputs[0].text for output in llm.generate([STORY] * 16, wanted)]
    bad_params = SamplingParams(max_tokens=20, temperature=0.0, stop="never", top_k=3)

    def for_bad(original: Callable[..., Any], is_bad: Callable[..., bool]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            if is_bad(*args):
                raise raised
            return original(*args, **kwargs)

        return faulty

    def samples_badly(logits: Tensor, proposal: Proposal, samplers: Sequence[Sampler], *_: object) -> bool:
        return any(sampler.params.top_k == 3 for sampler in samplers)

    owner, name, is_bad = {
        "verification": (llm.engine, "_verifier", samples_badly),
        "stop rule": (TextStream, "__call__", lambda stream, *_: stream._stop.strings == ("never",)),
        "text": (Request, "deltas", lambda request: request.params.top_k == 3),
    }[place]

    async def body(engine: AsyncLLM) -> None:
        params = [*wanted[:8], bad_params, *wanted[8:]]
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, for_bad(getattr(owner, name), is_bad))
            results = await asyncio.gather(*(engine.generate(STORY, one) for one in params), return_exceptions=True)
        bad = results.pop(8)
        assert isinstance(bad, RequestError)
        assert "KeyError: 'injected'" in str(bad)
        assert bad.__cause__ is raised
        assert [output.outputs[0].text for output in results if isinstance(output, RequestOutput)] == expected

    run(llm, body)


def test_shutdown_ends_running_requests_and_refuses_new_ones(llm: LLM) -> None:
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


def test_an_llm_has_at_most_one_async_llm(llm: LLM) -> None:
    first = AsyncLLM(llm=llm)
    with pytest.raises(ForedraftError, match="another AsyncLLM"):
        AsyncLLM(llm=llm)
    first.shutdown()
    AsyncLLM(llm=llm).shutdown()


def test_a_client_that_disconnects_is_in_at_most_one_more_step(llm: LLM) -> None:
    """A step may be running when the client leaves; its sequences are removed before the next one."""

    class Seen:
        def __init__(self) -> None:
            self.left = False
            self.num_steps_after = 0

        def observe(self, step: Step) -> None:
            self.num_steps_after += self.left and bool(step.scheduled)

    seen = Seen()
    llm.engine.observers.append(seen)

    async def body(engine: AsyncLLM) -> None:
        long = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True, n=3)
        requests = [await engine.prepare(STORY, long), await engine.prepare("def f(x):", long)]
        following = engine.follow(requests)
        await anext(following)
        await following.aclose()
        seen.left = True
        async with asyncio.timeout(60):
            while not all(request.is_finished for request in requests):
                await asyncio.sleep(0.01)

    try:
        run(llm, body)
    finally:
        llm.engine.observers.remove(seen)
    assert seen.num_steps_after <= 1


def test_deltas_that_arrive_while_the_caller_is_busy_are_batched(llm: LLM) -> None:
    long = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    expected = llm.generate(STORY, long)[0].outputs[0]

    async def body(engine: AsyncLLM) -> None:
        following = engine.follow([await engine.prepare(STORY, long)])
        batches = [await anext(following)]  # on a busy machine this may be the whole text
        while llm.engine.has_work:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # until the deltas of the last step have been sent
        batches += [batch async for batch in following]
        assert len(batches) <= 2
        assert "".join(delta.text for batch in batches for _, delta in batch) == expected.text

    run(llm, body)


def test_deltas_contain_their_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
    expected = llm.generate(STORY, params)[0].outputs[0].logprobs

    async def body(engine: AsyncLLM) -> None:
        deltas = [delta async for delta in engine.stream(STORY, params)]
        assert [entry for delta in deltas for entry in delta.logprobs or ()] == expected

    run(llm, body)


def test_a_step_that_fails_ends_every_request_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a request whose text could not be made in that step: it fails once, not twice."""
    expected = llm.generate(STORY, GREEDY)[0].outputs[0].text

    def unmade(request: Request) -> list[Delta]:
        raise ValueError("no text")

    def failing(meanwhile: Callable[[], None] | None = None) -> None:
        if meanwhile is not None:
            meanwhile()
        raise RuntimeError("the device is gone")

    async def body(engine: AsyncLLM) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Request, "deltas", unmade)
            patched.setattr(llm.engine, "step", failing)
            results = await asyncio.gather(*(engine.generate(STORY, GREEDY) for _ in range(2)), return_exceptions=True)
        assert [str(result) for result in results] == ["the device is gone"] * 2
        assert (await engine.generate(STORY, GREEDY)).outputs[0].text == expected

    run(llm, body)
