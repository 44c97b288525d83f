"""Tokens per second of a chat model with a head, compared with suffix and with plain decoding.

    python -m benchmarks.drafters.heads_on_chats HEAD --model MODEL [--quantization int8] [--draft-quantization int4] [--gammas 2 3]
        [--temperatures 0 0.8] [--questions 12] [--max-tokens 128] [--threads N] [--save NAME]

Batch 1, one run: the first turn of MT-bench's questions in the model's chat template, each answered by every system in an order that
rotates. With "auto" the controller chooses the number of draft tokens; "suffix + head" asks suffix first, and the head where it finds too
little; with trees, the head may grow one. Rows with a fixed γ use the head alone. Ratios are paired by question, and their
intervals bootstrapped over questions. At temperatures above 0 answers are sampled without a seed, so each system writes its own.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.common.prompts import chat_ids
from benchmarks.drafters.embedded_pair_speed import System, foredraft_system, run
from benchmarks.drafters.head_reports import Rows, over, report, sampling_title, table
from foredraft import LLM

PLAIN, SUFFIX = "plain decoding", "suffix, auto"


def systems_of(head: LLM, gammas: list[int], temperature: float) -> list[System]:
    suffix, both = head.with_drafter("suffix"), head.with_drafter("suffix+eagle")
    trees = head.with_drafter("suffix+eagle", speculative_token_tree="auto")
    return [
        foredraft_system(head, PLAIN, 0, temperature),
        foredraft_system(suffix, SUFFIX, "auto", temperature),
        *(foredraft_system(head, f"head, γ = {gamma}", gamma, temperature) for gamma in gammas),
        foredraft_system(head, "head, auto", "auto", temperature),
        foredraft_system(both, "suffix + head, auto", "auto", temperature),
        foredraft_system(trees, "suffix + head, auto with trees", "auto", temperature),
    ]


def measure(systems: list[System], prompts: list[list[int]], max_tokens: int) -> Rows:
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


def to_table(rows: Rows) -> str:
    return table(rows, ("plain decoding", "suffix"), lambda row: row["over"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head")
    parser.add_argument("--model", required=True)
    parser.add_argument("--quantization")
    parser.add_argument("--draft-quantization")
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
        draft_quantization=args.draft_quantization,
        num_threads=args.threads,
        enable_prefix_caching=False,
    )
    prompts = chat_ids(head.text_tokenizer, args.questions)
    sections = (
        (sampling_title(each), measure(systems_of(head, args.gammas, each), prompts, args.max_tokens))
        for each in args.temperatures
    )
    report(sections, to_table, args)


if __name__ == "__main__":
    main()
