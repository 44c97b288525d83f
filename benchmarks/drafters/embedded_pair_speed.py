"""Speed of the embedded pair: every drafter against plain decoding and transformers' generate, interleaved in one run.

    python -m benchmarks.drafters.embedded_pair_speed [--prompts 20] [--max-tokens 64] [--gammas 2 4 8] [--out benchmarks/results]

Batch 1, bfloat16, code prompts, greedy and at temperature 0.8. Every system runs once for every prompt, in an order
that rotates; figures are medians over prompts, ratios are paired by prompt, intervals are bootstrapped over prompts.
End of sequence is ignored, so that all write the same number of tokens. Also τ at γ = 4 on code and on stories.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import code_prompts, story_prompts
from foredraft import LLM, SamplingParams
from foredraft.bench.figures import repeated_share
from foredraft.bench.statistics import median_with_interval
from foredraft.engine.stats import SpeculationStats
from foredraft.model import EMBEDDED
from foredraft.utils.machine import this_machine

DRAFTERS = ("draft_model", "ngram", "suffix")


@dataclass
class System:
    """Writes a fixed number of tokens after each of some prompts at a time, and reports all tokens and the speculation statistics."""

    name: str
    write: Callable[[list[list[int]], int], tuple[list[int], SpeculationStats]]
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def measure(self, prompts: list[list[int]], max_tokens: int) -> list[int]:
        start = time.perf_counter()
        ids, stats = self.write(prompts, max_tokens)
        self.seconds.append(time.perf_counter() - start)
        assert len(ids) == max_tokens * len(prompts), f"{self.name} wrote {len(ids)} tokens"
        self.shares.append(repeated_share(ids))
        self.stats += stats
        return ids


def foredraft_system(
    llm: LLM, name: str, gamma: int | str | None, temperature: float, seed: int | None = None
) -> System:
    def write(prompts: list[list[int]], max_tokens: int) -> tuple[list[int], SpeculationStats]:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True, speculative_tokens=gamma
        )
        outputs = llm.generate(prompts, params)
        ids = [token for output in outputs for token in output.outputs[0].token_ids]
        return ids, sum((output.metrics.stats for output in outputs), SpeculationStats())

    return System(name, write)


def transformers_system(model: Any, temperature: float) -> System:
    settings: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    def write(prompts: list[list[int]], max_tokens: int) -> tuple[list[int], SpeculationStats]:
        (prompt,) = prompts
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            **settings,
        )
        return out[0, len(prompt) :].tolist(), SpeculationStats()

    return System("transformers generate", write)


def interval(values: list[float]) -> tuple[float, float]:
    """Bootstrapped 95 % interval of the median; a single value is its own interval."""
    bounds = median_with_interval(values).interval
    return (values[0], values[0]) if bounds is None else (bounds.low, bounds.high)


def run(systems: list[System], prompts: list[list[int]], max_tokens: int, batch: int = 1) -> int:
    """Time every system on every batch of prompts. -> the number of batches for which all of foredraft's systems wrote the same texts"""
    batches = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    for system in systems:
        system.write(batches[0], 16)
    same = 0
    for index, together in enumerate(batches):
        shift = index % len(systems)
        texts = {}
        for system in systems[shift:] + systems[:shift]:
            texts[system.name] = system.measure(together, max_tokens)
        same += len({tuple(text) for name, text in texts.items() if not name.startswith("transformers")}) == 1
    return same


def row(system: System, plain: System, reference: System, max_tokens: int) -> dict[str, Any]:
    over_plain = [a / b for a, b in zip(plain.seconds, system.seconds, strict=True)]
    over_reference = [a / b for a, b in zip(reference.seconds, system.seconds, strict=True)]
    return {
        "system": system.name,
        "tokens_per_second": max_tokens / statistics.median(system.seconds),
        "over_plain": statistics.median(over_plain),
        "over_plain_interval": interval(over_plain),
        "over_transformers": statistics.median(over_reference),
        "over_transformers_interval": interval(over_reference),
        "tau": system.stats.mean_acceptance_length,
        "alpha": system.stats.conditional_acceptance,
        "acceptance_rate": system.stats.draft_acceptance_rate,
        "repeated_8gram_share": statistics.mean(system.shares),
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = "| system | tokens/s | over plain | over transformers | τ | α | in repeated 8-grams |\n|---|---|---|---|---|---|---|"
    lines = [head]
    for r in rows:
        low, high = r["over_plain_interval"]
        tau, alpha = ("" if r[k] is None else f"{r[k]:.2f}" for k in ("tau", "alpha"))
        lines.append(
            f"| {r['system']} | {r['tokens_per_second']:.0f} | {r['over_plain']:.2f} ({low:.2f} to {high:.2f}) | "
            f"{r['over_transformers']:.2f} | {tau} | {alpha} | {100 * r['repeated_8gram_share']:.0f} % |"
        )
    return "\n".join(lines)


def acceptance(llms: dict[str, LLM], kinds: dict[str, list[list[int]]], max_tokens: int) -> list[dict[str, Any]]:
    """τ and α at γ = 4, and how much the texts repeat themselves."""
    rows = []
    for kind, prompts in kinds.items():
        for name in DRAFTERS:
            for temperature in (0.0, 0.8):
                params = SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, ignore_eos=True, speculative_tokens=4
                )
                outputs = llms[name].generate(prompts, params)
                stats = sum((o.metrics.stats for o in outputs), SpeculationStats())
                share = statistics.mean(repeated_share(o.outputs[0].token_ids) for o in outputs)
                rows.append(
                    {
                        "text": kind,
                        "drafter": name,
                        "temperature": temperature,
                        "tau": stats.mean_acceptance_length,
                        "alpha": stats.conditional_acceptance,
                        "tokens_per_pass": stats.tokens_per_pass,
                        "repeated_8gram_share": share,
                    }
                )
    return rows


def acceptance_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| text | temperature | drafter | τ (steps with a draft) | α | tokens per pass | in repeated 8-grams |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        tau, alpha = ("" if r[k] is None else f"{r[k]:.2f}" for k in ("tau", "alpha"))
        lines.append(
            f"| {r['text']} | {r['temperature']} | {r['drafter']} | {tau} | {alpha} | {r['tokens_per_pass']:.2f} | "
            f"{100 * r['repeated_8gram_share']:.0f} % |"
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    machine = this_machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": machine.processor,
        "capability": machine.cpu_capability,
        "threads": machine.num_threads,
        "torch": machine.torch,
        "transformers": machine.transformers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()

    llms = {name: LLM(method=name, seed=0, enable_prefix_caching=False) for name in DRAFTERS}
    reference = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.bfloat16).eval()
    tokenizer = llms["suffix"].tokenizer
    assert tokenizer is not None
    code = [tokenizer(prompt)["input_ids"] for prompt in code_prompts(args.prompts)]
    stories = [tokenizer(prompt)["input_ids"] for prompt in story_prompts(args.prompts)]

    report: dict[str, Any] = {"machine": machine(), "prompts": args.prompts, "max_tokens": args.max_tokens}
    parts = []
    for temperature in (0.0, 0.8):
        systems = [transformers_system(reference, temperature)]
        systems.append(foredraft_system(llms["suffix"], "plain", 0, temperature))
        for name in DRAFTERS:
            systems += [
                foredraft_system(llms[name], f"{name}, γ = {gamma}", gamma, temperature) for gamma in args.gammas
            ]
        same = run(systems, code, args.max_tokens)
        rows = [row(system, systems[1], systems[0], args.max_tokens) for system in systems]
        report[f"temperature {temperature}"] = {"rows": rows, "prompts_with_one_text": same}
        title = "greedy" if temperature == 0 else f"temperature {temperature}"
        parts.append(f"**Code prompts, {title}, batch 1**\n\n{table(rows)}")
        if temperature == 0:
            parts.append(f"Every drafter wrote plain decoding's text on {same} of {len(code)} prompts.")
    report["acceptance"] = acceptance(llms, {"code": code, "stories": stories}, args.max_tokens)
    parts.append(f"**Acceptance at γ = 4**\n\n{acceptance_table(report['acceptance'])}")
    parts.append("; ".join(f"{key} {value}" for key, value in report["machine"].items()))

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "speed.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "speed.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
