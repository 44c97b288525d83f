"""What the prefix cache gains: time to first token with and without it, and what it costs.

    python -m benchmarks.engine.prefix_cache [--target DIR] [--draft DIR] [--quantization int8] [--out FILE.json]

A system prompt of 1,000 tokens, and 50 requests that continue it differently: one after another, where requests with and
without the cache alternate, and all at once, where whole rounds alternate. The cache is empty when a round begins, so its
first request reads the system prompt. Both sides use one engine; texts are compared. Ratios are paired by request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.prompts import story_prompts
from foredraft import LLM, SamplingParams
from foredraft.engine.cache import KVCache
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.stats import PrefixStats
from foredraft.model import EMBEDDED
from foredraft.text.outputs import RequestOutput
from foredraft.utils.machine import this_machine

SIDES = ("on", "off")
PARTS = ("one_after_another", "all_at_once", "costs")


def prompts_of(llm: LLM, num_system: int, count: int) -> list[list[int]]:
    assert llm.tokenizer is not None
    system: list[int] = llm.tokenizer.encode(" ".join(story_prompts(400, num_words=60)))[:num_system]
    assert len(system) == num_system
    return [system + llm.tokenizer.encode(text, add_special_tokens=False) for text in story_prompts(count)]


def one_after_another(
    llm: LLM, prompts: Sequence[list[int]], params: dict[str, SamplingParams]
) -> Iterator[dict[str, RequestOutput]]:
    llm.engine.drop_retained()
    for index, prompt in enumerate(prompts):
        results = {}
        for side in SIDES if index % 2 else SIDES[::-1]:
            results[side] = llm.generate([prompt], params[side])[0]
        yield results


def all_at_once(
    llm: LLM, prompts: list[list[int]], params: dict[str, SamplingParams], rounds: int
) -> Iterator[dict[str, RequestOutput]]:
    for index in range(rounds):
        results = {}
        for side in SIDES if index % 2 else SIDES[::-1]:
            llm.engine.drop_retained()
            results[side] = llm.generate(prompts, params[side])
        yield from ({side: results[side][i] for side in SIDES} for i in range(len(prompts)))


def compared(llm: LLM, answers: Iterator[dict[str, RequestOutput]]) -> dict[str, Any]:
    """Figures of both sides; times are in milliseconds."""
    before = llm.engine.prefix_stats + PrefixStats(), llm.engine.draft_prefix_stats
    pairs = list(answers)
    after = llm.engine.prefix_stats, llm.engine.draft_prefix_stats
    times = {side: [1e3 * (pair[side].metrics.time_to_first_token or 0) for pair in pairs] for side in SIDES}
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    texts = [tuple(pair[side].outputs[0].token_ids for side in SIDES) for pair in pairs]
    return {
        "requests": len(pairs),
        "ttft_ms": {side: statistics.median(times[side]) for side in SIDES},
        "ttft_mean_ms": {side: statistics.fmean(times[side]) for side in SIDES},
        "ratio_median": statistics.median(ratios),
        "ratio_worst": max(ratios),
        "ratio_of_means": statistics.fmean(times["on"]) / statistics.fmean(times["off"]),
        "found_tokens_median": statistics.median(pair["on"].metrics.num_cached_tokens for pair in pairs),
        "hit_rate": {
            name: (b.num_found_tokens - a.num_found_tokens) / (b.num_asked_tokens - a.num_asked_tokens)
            for name, a, b in zip(("target", "draft"), before, after, strict=True)
        },
        "texts_identical": sum(on == off for on, off in texts),
    }


def copy_ms(engine: Engine, prompt: list[int]) -> float:
    """Milliseconds to begin a sequence with 1,000 tokens of a retained one."""
    times = []
    for seq_id in range(1_000_000, 1_000_015):
        began = time.perf_counter()
        results = engine.cache.start(seq_id, [*prompt[:1000], 1, 2])
        times.append(1e3 * (time.perf_counter() - began))
        assert results == 1000, results
        engine.cache.drop([seq_id])
    return statistics.median(times)


def search_us(num_texts: int) -> dict[str, float]:
    """Microseconds to find the longest match among num_texts retained texts, and to retain one more; they have no keys and values."""
    cache = KVCache(MemoryPool(1 << 40), 1, max_len=2048)
    shared = list(range(1000))
    for seq_id in range(num_texts):
        cache.region(seq_id).tokens = [*shared, *([5000 + seq_id] * 100)]
        cache.retain(seq_id, cache.region(seq_id).tokens)
    cache.region(num_texts).tokens = [*shared, *([4999] * 100)]
    return {
        "find": timed(lambda: cache.num_shared([*shared, 1, 2, 3])),
        "retain": timed(lambda: cache.retain(num_texts, cache.region(num_texts).tokens), repeats=1),
    }


def timed(call: Callable[[], object], repeats: int = 50) -> float:
    """Median in microseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--draft", type=Path, default=EMBEDDED / "draft")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--system", type=int, default=1000, help="tokens in the system prompt")
    parser.add_argument("--count", type=int, default=50, help="number of requests")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all requests at once")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="others stay as they are in --out")
    parser.add_argument("--name", default="the embedded pair")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    llm = LLM(args.target, args.draft, quantization=args.quantization, dtype="bfloat16", speculative_tokens=2)
    prompts = prompts_of(llm, args.system, args.count)
    common: dict[str, Any] = {"temperature": 0, "max_tokens": args.max_tokens, "ignore_eos": True}
    params = {side: SamplingParams(**common, prefix_caching=side == "on") for side in SIDES}
    llm.generate(prompts[:1], params["off"])  # warm up
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    result |= {
        "models": args.name,
        "machine": asdict(this_machine()),
        "system_tokens": args.system,
        "prompt_tokens_median": statistics.median(map(len, prompts)),
        "bytes_per_token": llm.target.traits.bytes_per_token,
    }
    if "one_after_another" in args.parts:
        result["one_after_another"] = compared(llm, one_after_another(llm, prompts, params))
    if "all_at_once" in args.parts:
        result["all_at_once"] = compared(llm, all_at_once(llm, prompts, params, args.rounds))
    if "costs" in args.parts:
        llm.generate(prompts[:1], params["on"])
        result["copy_1000_ms"] = copy_ms(llm.engine, prompts[0])
        result["search_us"] = {str(n): search_us(n) for n in (1, 100, 2000)}
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
