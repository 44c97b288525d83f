"""Tokens per target pass of drafters on MT-bench's questions, which no draft model or head here was trained on.

    python -m benchmarks.drafters.chat_acceptance --model MODEL [--draft-model HEAD] [--methods eagle suffix ...] [--gamma 5]
        [--temperatures 0 0.8] [--questions 80] [--questions-file FILE] [--max-tokens 256] [--batch 8] [--quantization int8]
        [--draft-quantization int4] [--both-turns] [--save NAME]

The prompts are the first turn of each question, in the model's chat template. With --both-turns the second turn follows,
after the model's own answer to the first, as in MT-bench itself (arXiv:2306.05685), where answers have up to 1,024 tokens.
FILE: other questions, such as those of recipes/chat_questions.py. τ is the mean number of tokens written by a step with a draft; α is
the share of evaluated draft tokens that were accepted, also given by position in the draft. At temperatures above 0 requests have no
seed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import message_ids, mt_bench_turns, questions_of
from benchmarks.common.reports import arguments_of, save
from foredraft import LLM, SamplingParams
from foredraft.utils.machine import this_machine


def chat(llm: LLM, questions: Sequence[Sequence[str]], params: SamplingParams) -> None:
    """Ask the turns of several questions, each turn of all of them together."""
    conversations: list[list[dict[str, str]]] = [[] for _ in questions]
    for turn in zip(*questions, strict=True):
        for messages, text in zip(conversations, turn, strict=True):
            messages.append({"role": "user", "content": text})
        answers = llm.generate([message_ids(llm.text_tokenizer, messages) for messages in conversations], params)
        for messages, answer in zip(conversations, answers, strict=True):
            messages.append({"role": "assistant", "content": answer.outputs[0].text})


def measure(
    llm: LLM, questions: Sequence[Sequence[str]], temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, speculative_tokens=args.gamma)
    for first in range(0, len(questions), args.batch):
        chat(llm, questions[first : first + args.batch], params)
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
    parser.add_argument("--both-turns", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    if args.both_turns and args.questions_file:
        parser.error("--both-turns asks MT-bench's questions; leave out --questions-file")
    first = LLM(
        args.model,
        args.draft_model,
        method=args.methods[0],
        quantization=args.quantization,
        draft_quantization=args.draft_quantization,
        seed=0,
    )
    questions = (
        mt_bench_turns(args.questions)
        if args.both_turns
        else [[question] for question in questions_of(args.questions_file, args.questions)]
    )
    rows = [
        {
            "drafter": method,
            "temperature": temperature,
            **measure(first.with_drafter(method), questions, temperature, args),
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
