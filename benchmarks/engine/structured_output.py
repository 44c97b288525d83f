"""Structured outputs: whether every text is valid, and tokens per second against unconstrained requests.

    python -m benchmarks.engine.structured_output [--target DIR] [--draft DIR] [--quantization int8] [--requests 200] [--batch 8]

JSON-schema requests ("form") at temperature 1, in batches, with speculation "auto" and plain (--draft-tokens). After each batch, unconstrained
requests ("free") write as many tokens from the same prompts. The ratio is the median over batches of the constrained batch's tokens per
second over those of the unconstrained batch after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import story_prompts
from foredraft import LLM, RequestOutput, SamplingParams, StructuredOutputs
from foredraft.model import EMBEDDED
from foredraft.utils.machine import this_machine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 4, "maxLength": 60},
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", "angry", "scared"]},
        "friends": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["dog", "cat", "child"]}},
                "required": ["name", "kind"],
                "additionalProperties": False,
            },
        },
        "summary": {"type": "string", "minLength": 20, "maxLength": 200},
    },
    "required": ["title", "name", "age", "mood", "friends", "summary"],
    "additionalProperties": False,
}
FORM = SamplingParams(
    temperature=1.0, top_p=1.0, top_k=0, max_tokens=400, structured_outputs=StructuredOutputs(json=SCHEMA)
)
FREE = replace(FORM, structured_outputs=None, ignore_eos=True)
GAMMAS: dict[str, int | str] = {"auto": "auto", "plain": 0, "4": 4}


def is_valid(output: RequestOutput) -> bool:
    text = output.outputs[0]
    try:
        jsonschema.validate(json.loads(text.text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return text.finish_reason == "stop"


def timed(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> tuple[list[RequestOutput], float]:
    """-> outputs, tokens per second"""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    return outputs, sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def share_accepted(outputs: list[RequestOutput]) -> float | None:
    stats = [output.metrics.speculative_decoding for output in outputs]
    drafted = sum(one.num_draft_tokens for one in stats)
    return sum(one.num_accepted_draft_tokens for one in stats) / drafted if drafted else None


def measure(llm: LLM, prompts: list[str], batch: int, draft_tokens: list[str]) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {f"{form}, {gamma}": [] for gamma in draft_tokens for form in ("form", "free")}
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in speeds}
    warm_up = [replace(FREE, max_tokens=100)] * batch
    for _ in range(3):
        timed(llm, prompts[:batch], warm_up)
        timed(llm, prompts[:batch], [FORM] * batch)
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        for name in draft_tokens:
            gamma = GAMMAS[name]
            result, speed = timed(llm, some, [replace(FORM, speculative_tokens=gamma)] * len(some))
            speeds[f"form, {name}"].append(speed)
            outputs[f"form, {name}"] += result
            lengths = [len(output.outputs[0].token_ids) for output in result]
            free = [replace(FREE, max_tokens=length, speculative_tokens=gamma) for length in lengths]
            result, speed = timed(llm, some, free)
            speeds[f"free, {name}"].append(speed)
            outputs[f"free, {name}"] += result
    return {
        "tokens_per_second": {name: statistics.median(result) for name, result in speeds.items()},
        "ratio": {
            name: statistics.median(
                a / b for a, b in zip(speeds[f"form, {name}"], speeds[f"free, {name}"], strict=True)
            )
            for name in draft_tokens
        },
        "valid": {name: sum(map(is_valid, outputs[f"form, {name}"])) for name in draft_tokens},
        "requests": len(prompts),
        "tokens_per_text": statistics.mean(len(o.outputs[0].token_ids) for o in outputs[f"form, {draft_tokens[0]}"]),
        "draft_acceptance_rate": {name: share_accepted(result) for name, result in outputs.items()},
        "mean_acceptance_length": {
            name: sum(len(o.outputs[0].token_ids) for o in result)
            / max(1, sum(o.metrics.speculative_decoding.num_steps for o in result))
            for name, result in outputs.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(EMBEDDED / "target"))
    parser.add_argument("--draft", default=str(EMBEDDED / "draft"))
    parser.add_argument("--name", default="embedded", help="the target's name in the result")
    parser.add_argument("--quantization")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--draft-tokens", nargs="+", choices=list(GAMMAS), default=["auto", "plain"], help="draft tokens"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    llm = LLM(args.target, args.draft, quantization=args.quantization, seed=0)
    result = {
        "machine": asdict(this_machine()),
        "settings": {"target": args.name, "quantization": args.quantization, "batch": args.batch, "temperature": 1.0},
        **measure(llm, story_prompts(args.requests), args.batch, args.draft_tokens),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"structured-{args.name}-batch{args.batch}.json"
    (args.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
