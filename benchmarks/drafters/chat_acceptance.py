"""Tokens per target pass of drafters on MT-bench's questions, which no draft model or head here was trained on.

    python -m benchmarks.drafters.chat_acceptance --model MODEL [--draft-model HEAD] [--methods eagle suffix ...] [--gamma 5]
        [--temperatures 0 0.8] [--questions 80] [--questions-file FILE] [--max-tokens 256] [--batch 8] [--quantization int8]
        [--draft-quantization int4] [--save NAME]

The prompts are the first turn of each question, in the model's chat template. FILE: other questions, such as those of
recipes/chat_questions.py. τ is the mean number of tokens written by a step with a draft; α is the share of evaluated draft tokens
that were accepted, also given by position in the draft. At temperatures above 0 requests have no seed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import question_ids, questions_of
from benchmarks.common.reports import arguments_of, save
from foredraft import LLM, SamplingParams
from foredraft.utils.machine import this_machine


def measure(llm: LLM, prompts: list[list[int]], temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, speculative_tokens=args.gamma)
    for first in range(0, len(prompts), args.batch):
        llm.generate(prompts[first : first + args.batch], params)
    stats = llm.engine.stats
    places = zip(stats.accepted_per_position, stats.evaluated_per_position, strict=False)
    return {
        "tau": stats.mean_acceptance_length,
        "alpha": stats.conditional_acceptance,
        "by_place": [accepted / evaluated for accepted, evaluated in places if evaluated],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| drafter | temperature | τ | α | by place |", "|---|---|---|---|---|"]
    for row in rows:
        places = " / ".join(f"{share:.2f}" for share in row["by_place"])
        lines.append(
            f"| {row['drafter']} | {row['temperature']:g} | {row['tau']:.2f} | {row['alpha']:.2f} | {places} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model")
    parser.add_argument("--methods", nargs="+", default=["eagle", "suffix", "ngram"])
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--questions-file", type=Path)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--quantization")
    parser.add_argument("--draft-quantization")
    parser.add_argument("--save")
    args = parser.parse_args()
    first = LLM(
        args.model,
        args.draft_model,
        method=args.methods[0],
        quantization=args.quantization,
        draft_quantization=args.draft_quantization,
        seed=0,
    )
    prompts = question_ids(first.text_tokenizer, questions_of(args.questions_file, args.questions))
    rows = [
        {
            "drafter": method,
            "temperature": temperature,
            **measure(first.with_drafter(method), prompts, temperature, args),
        }
        for method in args.methods
        for temperature in args.temperatures
    ]
    if not args.save:
        print(table(rows))
    else:
        report = {"date": time.strftime("%Y-%m-%d"), "machine": asdict(this_machine()), "arguments": arguments_of(args)}
        save(report | {"rows": rows}, table(rows) + "\n", RESULTS, "chat-acceptance", args.save)


if __name__ == "__main__":
    main()
