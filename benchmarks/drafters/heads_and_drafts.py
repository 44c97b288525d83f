"""Tokens per second with a head, beside a draft model for the same target and plain decoding.

    python -m benchmarks.drafters.heads_and_drafts HEAD [--target DIR] [--draft DIR] [--quantization int8] [--gammas 4 auto]
        [--texts code stories] [--temperatures 0 0.8] [--prompts 12] [--max-tokens 96] [--threads N] [--save NAME]

Without --target and --draft: the embedded pair. Batch 1, one run: every prompt is written by each in an order that rotates. Ratios are
paired by prompt, and their intervals bootstrapped over prompts. At temperatures above 0 texts are drawn without a seed, so each
system writes its own. For widened copies see benchmarks/peers/workers/checkpoint.py and benchmarks/common/wide_heads.py.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import code_prompts, story_prompts
from benchmarks.common.reports import save
from benchmarks.drafters.embedded_pair_speed import System, foredraft_system, interval, machine, run
from foredraft import LLM
from foredraft.model import EMBEDDED

PROMPTS = {"code": code_prompts, "stories": story_prompts}


def measure(
    llms: dict[str, LLM], gammas: list[int | str], kind: str, temperature: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    tokenizer = llms["head"].text_tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS[kind](args.prompts)]
    plain = foredraft_system(llms["draft model"], "plain decoding", 0, temperature)
    drafting = {
        (name, gamma): foredraft_system(llm, f"{name}, γ = {gamma}", gamma, temperature)
        for gamma in gammas
        for name, llm in llms.items()
    }
    run([plain, *drafting.values()], prompts, args.max_tokens)
    rows = [row(plain, plain, None, args.max_tokens)]
    for (name, gamma), each in drafting.items():
        rival = drafting["draft model", gamma] if name == "head" else None
        rows.append(row(each, plain, rival, args.max_tokens))
    return rows


def row(one: System, plain: System, rival: System | None, max_tokens: int) -> dict[str, Any]:
    def over(other: System) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(other.seconds, one.seconds, strict=True)]
        return {"median": statistics.median(ratios), "interval": interval(ratios)}

    return {
        "system": one.name,
        "tokens_per_second": max_tokens / statistics.median(one.seconds),
        "over_plain": over(plain),
        "over_draft_model": None if rival is None else over(rival),
        "tau": one.stats.mean_acceptance_length,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| system | tokens/s | over plain decoding | over the draft model | τ |", "|---|---|---|---|---|"]
    for r in rows:
        ratios = [
            "" if ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(ratio["median"], *ratio["interval"])
            for ratio in (r["over_plain"], r["over_draft_model"])
        ]
        tau = "" if r["tau"] is None else f"{r['tau']:.2f}"
        lines.append(f"| {r['system']} | {r['tokens_per_second']:.0f} | {ratios[0]} | {ratios[1]} | {tau} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--target", default=str(EMBEDDED / "target"))
    parser.add_argument("--draft", default=str(EMBEDDED / "draft"))
    parser.add_argument("--quantization")
    parser.add_argument("--gammas", nargs="+", default=["4", "auto"])
    parser.add_argument("--texts", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", metavar="NAME")
    args = parser.parse_args()
    gammas: list[int | str] = [gamma if gamma == "auto" else int(gamma) for gamma in args.gammas]
    llms = {
        name: LLM(
            args.target, draft, quantization=args.quantization, num_threads=args.threads, enable_prefix_caching=False
        )
        for name, draft in (("draft model", args.draft), ("head", args.head))
    }
    report: dict[str, Any] = {"machine": machine(), "quantization": args.quantization, "max_tokens": args.max_tokens}
    parts = []
    for kind in args.texts:
        for temperature in args.temperatures:
            title = f"{kind}, {'greedy' if temperature == 0 else f'temperature {temperature:g}'}"
            report[title] = measure(llms, gammas, kind, temperature, args)
            parts.append(f"**{title}**\n\n{table(report[title])}")
            print(parts[-1], flush=True)
    parts.append("; ".join(f"{key} {value}" for key, value in report["machine"].items()))
    if args.save is not None:
        save(report, "\n\n".join(parts) + "\n", RESULTS, args.save)


if __name__ == "__main__":
    main()
