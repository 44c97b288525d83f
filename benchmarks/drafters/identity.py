"""How many tokens are the same as plain decoding's, for every drafter, precision and batch size. Nothing is timed.

    python -m benchmarks.drafters.identity [--target DIR] [--prompts 100] [--max-tokens 256] [--batch 1 8]

Greedy and seeded (temperature 0.8, top-p 0.9); plain decoding runs alone, at batch 1. Exits with 1 if any token differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.common.prompts import code_prompts, story_prompts
from foredraft import LLM, SamplingParams
from foredraft.model import EMBEDDED

DRAFTERS = ("none", "draft_model", "ngram", "suffix", "self-int8", "self-int4")


def texts(llm: LLM, prompts: list[str], batch: int, args: argparse.Namespace) -> list[list[int]]:
    """Greedy texts for half of the prompts, seeded ones for the other half."""
    greedy = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, temperature=0.0)
    seeded = replace(greedy, temperature=0.8, top_p=0.9)
    params = [greedy if i % 2 else replace(seeded, seed=i) for i in range(len(prompts))]
    result: list[list[int]] = []
    for i in range(0, len(prompts), batch):
        result += [o.outputs[0].token_ids for o in llm.generate(prompts[i : i + batch], params[i : i + batch])]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--draft", type=Path, default=EMBEDDED / "draft")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--gamma", type=int, default=4)
    args = parser.parse_args()
    half = args.prompts // 2
    prompts = code_prompts(args.prompts - half) + story_prompts(half)
    differing = 0
    print("| precision | drafter | batch | tokens | identical to plain decoding |\n|---|---|---|---|---|")
    for quantization in ("none", "int8", "int4"):
        plain: list[list[int]] = []
        for method in DRAFTERS:
            llm = LLM(
                args.target,
                args.draft if method == "draft_model" else None,
                method=method,
                quantization=quantization,
                speculative_tokens=args.gamma,
                dtype="bfloat16",
            )
            plain = plain or texts(llm, prompts, 1, args)
            for batch in args.batch:
                pairs = list(zip(texts(llm, prompts, batch, args), plain, strict=True))
                count = sum(len(b) for _, b in pairs)
                same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=True))
                differing += count - same
                precision = "bfloat16" if quantization == "none" else quantization
                print(
                    f"| {precision} | {method} | {batch} | {count} | {100 * same / count:.1f} % ({same}) |", flush=True
                )
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
