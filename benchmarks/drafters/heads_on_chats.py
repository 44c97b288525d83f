"""Tokens per second of a chat model with a head, beside suffix and plain decoding.

    python -m benchmarks.drafters.heads_on_chats HEAD --model MODEL [--quantization int8] [--gammas 2 3] [--temperatures 0 0.8]
        [--questions 12] [--max-tokens 128] [--threads N] [--save NAME]

Batch 1, one run: the first turn of MT-bench's questions in the model's chat template, each answered by every system in an order that
rotates. "auto" chooses as it goes; "suffix + head" merges both drafters, with trees where they pay. Fixed numbers of tokens are the
head's alone. Ratios are paired by question, and their intervals bootstrapped over questions. At temperatures above 0 answers are
drawn without a seed, so each system writes its own.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import chat_ids
from benchmarks.common.reports import save
from benchmarks.drafters.embedded_pair_speed import System, foredraft_system, interval, machine, run
from foredraft import LLM

PLAIN, SUFFIX = "plain decoding", "suffix, auto"


def systems_of(head: LLM, gammas: list[int], temperature: float) -> list[System]:
    suffix, both = head.with_drafter("suffix"), head.with_drafter("suffix+eagle", speculative_token_tree="auto")
    return [
        foredraft_system(head, PLAIN, 0, temperature),
        foredraft_system(suffix, SUFFIX, "auto", temperature),
        *(foredraft_system(head, f"head, γ = {gamma}", gamma, temperature) for gamma in gammas),
        foredraft_system(head, "head, auto", "auto", temperature),
        foredraft_system(both, "suffix + head, auto", "auto", temperature),
    ]


def measure(systems: list[System], prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
    run(systems, prompts, max_tokens)
    references = {one.name: one for one in systems if one.name in (PLAIN, SUFFIX)}
    return [
        {
            "system": one.name,
            "tokens_per_second": max_tokens / statistics.median(one.seconds),
            "over": {name: over(one, reference) for name, reference in references.items()},
            "tau": one.stats.mean_acceptance_length,
        }
        for one in systems
    ]


def over(one: System, reference: System) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(reference.seconds, one.seconds, strict=True)]
    return {"median": statistics.median(ratios), "interval": interval(ratios)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| system | tokens/s | over plain decoding | over suffix | τ |", "|---|---|---|---|---|"]
    for row in rows:
        ratios = [
            "{:.2f} ({:.2f} to {:.2f})".format(each["median"], *each["interval"]) for each in row["over"].values()
        ]
        tau = "" if row["tau"] is None else f"{row['tau']:.2f}"
        lines.append(f"| {row['system']} | {row['tokens_per_second']:.0f} | {' | '.join(ratios)} | {tau} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--gammas", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", metavar="NAME")
    args = parser.parse_args()
    head = LLM(
        args.model,
        args.head,
        quantization=args.quantization,
        num_threads=args.threads,
        enable_prefix_caching=False,
    )
    prompts = chat_ids(head.text_tokenizer, args.questions)
    report: dict[str, Any] = {"machine": machine(), "quantization": args.quantization, "max_tokens": args.max_tokens}
    parts = []
    for temperature in args.temperatures:
        title = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        report[title] = measure(systems_of(head, args.gammas, temperature), prompts, args.max_tokens)
        parts.append(f"**{title}**\n\n{table(report[title])}")
        print(parts[-1], flush=True)
    parts.append("; ".join(f"{key} {value}" for key, value in report["machine"].items()))
    if args.save is not None:
        save(report, "\n\n".join(parts) + "\n", RESULTS, args.save)


if __name__ == "__main__":
    main()
