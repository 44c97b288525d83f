"""Tokens per second with a head, compared with a draft model for the same target and with plain decoding.

    python -m benchmarks.drafters.heads_and_drafts HEAD [--target DIR] [--draft DIR] [--quantization int8]
        [--draft-quantizations RIVAL OWN] [--gammas 4 auto] [--texts code stories] [--temperatures 0 0.8] [--prompts 12]
        [--max-tokens 96] [--threads N] [--names RIVAL OWN] [--save NAME]

Target and draft model default to the embedded pair. Any drafter can take the place of the head or of the draft model: --names says what
the two are, the rival (--draft) first. Batch 1, one run: every system writes every prompt, in an order that rotates. Ratios
are paired by prompt, and their intervals bootstrapped over prompts. At temperatures above 0 texts are sampled without a seed, so each
system writes its own. For widened copies see benchmarks/peers/workers/checkpoint.py and benchmarks/common/wide_heads.py.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.common.prompts import code_prompts, story_prompts
from benchmarks.drafters.embedded_pair_speed import System, foredraft_system, run
from benchmarks.drafters.head_reports import Rows, over, report, sampling_title, table
from foredraft import LLM
from foredraft.model import EMBEDDED

PROMPTS = {"code": code_prompts, "stories": story_prompts}


def measure(
    llms: dict[str, LLM], gammas: list[int | str], kind: str, temperature: float, args: argparse.Namespace
) -> Rows:
    rival_name, own_name = llms
    tokenizer = llms[own_name].text_tokenizer
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS[kind](args.prompts)]
    plain = foredraft_system(llms[rival_name], "plain decoding", 0, temperature)
    drafting = {
        (name, gamma): foredraft_system(llm, f"{name}, γ = {gamma}", gamma, temperature)
        for gamma in gammas
        for name, llm in llms.items()
    }
    run([plain, *drafting.values()], prompts, args.max_tokens)
    rows = [row(plain, plain, None, args.max_tokens)]
    for (name, gamma), each in drafting.items():
        rival = drafting[rival_name, gamma] if name == own_name else None
        rows.append(row(each, plain, rival, args.max_tokens))
    return rows


def row(one: System, plain: System, rival: System | None, max_tokens: int) -> dict[str, Any]:
    return {
        "system": one.name,
        "tokens_per_second": max_tokens / statistics.median(one.seconds),
        "over_plain": over(one, plain),
        "over_rival": None if rival is None else over(one, rival),
        "tau": one.stats.mean_acceptance_length,
    }


def to_table(rows: Rows, rival: str) -> str:
    return table(rows, ("plain decoding", f"the {rival}"), lambda row: (row["over_plain"], row["over_rival"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--target", default=str(EMBEDDED / "target"))
    parser.add_argument("--draft", default=str(EMBEDDED / "draft"))
    parser.add_argument("--quantization")
    parser.add_argument("--draft-quantizations", nargs=2, default=[None, None], metavar=("RIVAL", "OWN"))
    parser.add_argument("--gammas", nargs="+", default=["4", "auto"])
    parser.add_argument("--texts", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--names", nargs=2, default=["draft model", "head"])
    parser.add_argument("--save", metavar="NAME")
    args = parser.parse_args()
    gammas: list[int | str] = [gamma if gamma == "auto" else int(gamma) for gamma in args.gammas]
    llms = {
        name: LLM(
            args.target,
            draft,
            quantization=args.quantization,
            draft_quantization=rounding,
            num_threads=args.threads,
            enable_prefix_caching=False,
        )
        for name, draft, rounding in zip(args.names, (args.draft, args.head), args.draft_quantizations, strict=True)
    }
    sections = (
        (f"{kind}, {sampling_title(temperature)}", measure(llms, gammas, kind, temperature, args))
        for kind in args.texts
        for temperature in args.temperatures
    )
    report(sections, partial(to_table, rival=args.names[0]), args)


if __name__ == "__main__":
    main()
