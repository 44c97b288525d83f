"""How a large request of one client delays the small requests of another: their times to the first token.

One client requests n texts of one prompt. Another sends small requests, one after the other, while the texts are generated. This
runs once with two clients, and once as one client, which is first come, first served.

    python -m benchmarks.server.fairness [--texts 128] [--tokens 64] [--small 16] [--requests 8]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import aclosing

from foredraft import AsyncLLM, SamplingParams

PROMPT = "Once upon a time there was a fox who lived by the river."
SMALL_PROMPT = "The cat of the day is"


async def first_token(llm: AsyncLLM, client: str, tokens: int) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    started, first = time.perf_counter(), 0.0
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1)
    async with aclosing(llm.stream(SMALL_PROMPT, params, client=client)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            first = first or time.perf_counter() - started
    return first, time.perf_counter() - started


async def flood(llm: AsyncLLM, client: str, texts: int, tokens: int) -> float:
    started = time.perf_counter()
    await llm.generate(PROMPT, SamplingParams(n=texts, max_tokens=tokens, ignore_eos=True, seed=0), client=client)
    return time.perf_counter() - started


async def measure(llm: AsyncLLM, given: argparse.Namespace, *, are_told_apart: bool) -> str:
    work = asyncio.create_task(flood(llm, "flood", given.texts, given.tokens))
    await asyncio.sleep(0.2)
    times: list[tuple[float, float]] = []
    while not work.done() and len(times) < given.requests:
        times.append(await first_token(llm, "small" if are_told_apart else "flood", given.small))
    firsts = sorted(first for first, _ in times)
    return (
        f"{'told apart' if are_told_apart else 'one client':<12} small requests during the flood: {len(times)}, first token "
        f"after {statistics.median(firsts):.3f} s (median), {firsts[-1]:.3f} s (worst); last after "
        f"{max(last for _, last in times):.3f} s (worst); the flood took {await work:.1f} s"
    )


async def main(given: argparse.Namespace) -> None:
    async with AsyncLLM(method=given.method) as llm:
        await first_token(llm, "warm-up", given.small)
        for are_told_apart in (False, True) * given.rounds:
            print(await measure(llm, given, are_told_apart=are_told_apart), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--small", type=int, default=16)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--method", default=None)
    asyncio.run(main(parser.parse_args()))
