"""Tokens per second with trees, compared with chains and plain decoding.

    python -m benchmarks.drafters.trees --name NAME [--model MODEL] [--draft-model MODEL] [--method METHOD] [--quantization int8]
        [--texts code stories chats] [--temperatures 0 0.8 1] [--prompts 12] [--batch 1] [--max-tokens 128] [--threads 1]
        [--shapes JSON ...] [--save]

With several methods, such as suffix+draft_model, the trees of all are merged, and each method is also measured alone; one more row gives
"auto" over the better of them.

Every batch of prompts is written by plain decoding, by "auto" without and with trees, and with every given fixed shape, in an order
that rotates. At temperatures above 0 the prompts are written with a seed and without. Ratios are paired by batch, and their intervals
bootstrapped over batches. The first rounds of "auto", in which it learns, count like all others. Tokens per second are those of a whole
batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import chat_ids, code_prompts, story_prompts
from benchmarks.common.reports import arguments_of, save
from benchmarks.drafters.embedded_pair_speed import System, foredraft_system, interval, run
from foredraft import LLM
from foredraft.model import EMBEDDED
from foredraft.utils.machine import this_machine

SEED = 7
ALONE = "auto, only "


def samplings(temperatures: list[float]) -> dict[str, dict[str, Any]]:
    """Sampling parameters, by name."""
    found: dict[str, dict[str, Any]] = {}
    for temperature in temperatures:
        if temperature == 0:
            found["greedy"] = {"temperature": 0.0}
            continue
        found[f"seeded, temperature {temperature:g}"] = {"temperature": temperature, "seed": SEED}
        found[f"unseeded, temperature {temperature:g}"] = {"temperature": temperature}
    return found


def prompts_of(llm: LLM, kind: str, count: int) -> list[list[int]]:
    tokenizer = llm.text_tokenizer
    if kind == "chats":
        return chat_ids(tokenizer, count)
    texts = code_prompts(count) if kind == "code" else story_prompts(count)
    return [tokenizer(text)["input_ids"] for text in texts]


def row(one: System, reference: System, num_tokens: int) -> dict[str, Any]:
    """num_tokens: that a whole batch writes"""
    ratios = [a / b for a, b in zip(reference.seconds, one.seconds, strict=True)]
    return {
        "system": one.name,
        "tokens_per_second": num_tokens / statistics.median(one.seconds),
        "ratio": sum(reference.seconds) / sum(one.seconds),
        "median": statistics.median(ratios),
        "interval": interval(ratios),
        "tau": one.stats.mean_acceptance_length,
    }


def measure(
    llms: dict[str, LLM], prompts: list[list[int]], sampling: dict[str, Any], max_tokens: int, batch: int
) -> dict[str, Any]:
    systems = [foredraft_system(llm, name, None, **sampling) for name, llm in llms.items()]
    same = run(systems, prompts, max_tokens, batch)
    num_tokens = max_tokens * batch
    chains = next(one for one in systems if one.name == "auto, chains")
    return {"same": same, "rows": [row(one, chains, num_tokens) for one in systems] + over_parts(systems, num_tokens)}


def over_parts(systems: list[System], num_tokens: int) -> list[dict[str, Any]]:
    """A row for "auto" with all methods over the method that was fastest alone; no rows if there is only one method."""
    parts = [one for one in systems if one.name.startswith(ALONE)]
    if not parts:
        return []
    best = min(parts, key=lambda part: sum(part.seconds))
    merged = next(one for one in systems if one.name == "auto")
    return [row(merged, best, num_tokens) | {"system": f"auto, over the better ({best.name.removeprefix(ALONE)})"}]


def alone(given: LLM) -> dict[str, LLM]:
    """Each of several methods alone, with trees, by name."""
    methods = given.method.split("+")
    if len(methods) == 1:
        return {}
    return {ALONE + method: given.with_drafter(method, speculative_token_tree="auto") for method in methods}


def table(results: dict[str, Any]) -> str:
    lines = ["| texts | sampling | drafts | tokens/s | over auto with chains | τ |", "|---|---|---|---|---|---|"]
    for kind, by_sampling in results.items():
        for sampling, result in by_sampling.items():
            for r in result["rows"]:
                (low, high), tau = r["interval"], r["tau"]
                lines.append(
                    f"| {kind} | {sampling} | {r['system']} | {r['tokens_per_second']:.0f} | "
                    f"{r['median']:.3f} ({low:.3f} to {high:.3f}) | {'' if tau is None else f'{tau:.2f}'} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", default=str(EMBEDDED / "target"))
    parser.add_argument("--draft-model")
    parser.add_argument("--method")
    parser.add_argument("--quantization")
    parser.add_argument("--texts", nargs="+", default=["code", "stories"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time; must divide the number of prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="*", type=json.loads, default=[])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.batch < 1 or args.prompts % args.batch:
        parser.error("--prompts must be a multiple of --batch")
    torch.set_num_threads(args.threads)
    given = LLM(
        args.model,
        args.draft_model,
        method=args.method,
        quantization=args.quantization,
        enable_prefix_caching=False,
        num_threads=args.threads,
    )
    llms = {
        "plain": given.with_drafter("none"),
        "auto, chains": given.with_drafter(speculative_token_tree="none"),
        "auto": given.with_drafter(speculative_token_tree="auto"),
        **alone(given),
        **{json.dumps(shape): given.with_drafter(speculative_token_tree=shape) for shape in args.shapes},
    }
    results: dict[str, Any] = {}
    for kind in args.texts:
        prompts = prompts_of(given, kind, args.prompts)
        results[kind] = {
            name: measure(llms, prompts, sampling, args.max_tokens, args.batch)
            for name, sampling in samplings(args.temperatures).items()
        }
        print(table({kind: results[kind]}), flush=True)
    if args.save:
        report = {"date": time.strftime("%Y-%m-%d"), "machine": asdict(this_machine()), "arguments": arguments_of(args)}
        save(report | {"results": results}, table(results) + "\n", RESULTS, "trees", args.name)


if __name__ == "__main__":
    main()
