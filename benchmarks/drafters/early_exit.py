"""Early exits of the embedded target: acceptance and speed by layer, with the final norm and with trained exits.

    python -m benchmarks.drafters.early_exit [--trained LAYER=DIR ...] [--gammas 1 2 4] [--prompts 12] [--max-tokens 64]
        [--threads 1] [--out benchmarks/results]

Batch 1, bfloat16, held-out code and stories alternately, greedy and at temperature 0.8. Every prompt runs with plain decoding, with
the shipped draft model and with every exit, in an order that rotates. τ and α are counted over all steps with a draft; speed ratios
are paired by prompt, and their intervals are bootstrapped over prompts. Each exit is shown at its best γ. "of a pass" is the share of
the target's weights that one drafted token reads, in layers, exit and lm_head; "needed" is the α at which drafting one token would
break even if that share were its cost, or 1 if it cannot pay. The embedding is not counted, since only one row of it is read.

Exits are made by `foredraft train head --kind exit --exit-layer LAYER --target src/foredraft/embedded/target ...`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from benchmarks.common.paths import RESULTS
from benchmarks.common.prompts import code_prompts, story_prompts
from benchmarks.drafters.embedded_pair_speed import System, foredraft_system, interval, run
from foredraft import LLM
from foredraft.heads import EarlyExit
from foredraft.model import EMBEDDED
from foredraft.utils.machine import this_machine

TARGET = EMBEDDED / "target"
TEMPERATURES = (0.0, 0.8)


def exits(trained: dict[int, str]) -> dict[str, LLM]:
    """By name: untrained exits after every layer, and the trained ones."""
    settings: dict[str, Any] = {"seed": 0, "enable_prefix_caching": False}
    num_layers = LLM(TARGET, method="none").target.hf.config.num_hidden_layers
    untrained = {f"layer {layer}": LLM(TARGET, exit_layer=layer, **settings) for layer in range(1, num_layers)}
    made = {f"layer {layer}, trained": LLM(TARGET, at, **settings) for layer, at in sorted(trained.items())}
    return untrained | made


def share_of_pass(llm: LLM) -> float:
    """The number of weights that a drafted token reads over the number that a token of the target reads."""
    config, head = llm.target.hf.config, head_of(llm)
    layer, ends = numbers_of_layer(config), config.vocab_size * config.hidden_size
    adapter = 3 * config.hidden_size * head.config.adapter_size
    return float((head.config.layer * layer + adapter + ends) / (config.num_hidden_layers * layer + ends))


def numbers_of_layer(config: PretrainedConfig) -> int:
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return int(config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size))


def head_of(llm: LLM) -> EarlyExit:
    head = llm._builder.models.head
    assert isinstance(head, EarlyExit)
    return head


def row(name: str, systems: dict[int, System], plain: System, max_tokens: int, llm: LLM | None) -> dict[str, Any]:
    """The figures of one drafter at its best γ."""
    ratios = {g: [a / b for a, b in zip(plain.seconds, s.seconds, strict=True)] for g, s in systems.items()}
    gamma = max(ratios, key=lambda g: statistics.median(ratios[g]))
    stats = systems[gamma].stats
    share = None if llm is None else share_of_pass(llm)
    return {
        "drafter": name,
        "gamma": gamma,
        "tokens_per_second": max_tokens / statistics.median(systems[gamma].seconds),
        "over_plain": statistics.median(ratios[gamma]),
        "over_plain_interval": interval(ratios[gamma]),
        "over_plain_by_gamma": {g: statistics.median(values) for g, values in ratios.items()},
        "alpha": stats.conditional_acceptance,
        "tau": stats.mean_acceptance_length,
        "share_of_pass": share,
    }


def measure(
    llms: dict[str, LLM], plain_llm: LLM, prompts: list[list[int]], temperature: float, args: argparse.Namespace
) -> dict[str, Any]:
    plain = foredraft_system(plain_llm, "plain", 0, temperature)
    systems = {
        name: {g: foredraft_system(llm, f"{name}, γ = {g}", g, temperature) for g in args.gammas}
        for name, llm in llms.items()
    }
    same = run([plain, *(s for by_gamma in systems.values() for s in by_gamma.values())], prompts, args.max_tokens)
    rows = [
        row(name, by_gamma, plain, args.max_tokens, llms[name] if name.startswith("layer") else None)
        for name, by_gamma in systems.items()
    ]
    return {"plain_tokens_per_second": args.max_tokens / statistics.median(plain.seconds), "rows": rows, "same": same}


def table(result: dict[str, Any]) -> str:
    lines = ["| drafts | of a pass | needed α | α | τ | best γ | speed over plain |", "|---|---|---|---|---|---|---|"]
    for r in result["rows"]:
        share, (low, high) = r["share_of_pass"], r["over_plain_interval"]
        shares = ("", "") if share is None else (f"{share:.2f}", f"{min(1.0, share):.2f}")
        lines.append(
            f"| {r['drafter']} | {shares[0]} | {shares[1]} | {r['alpha']:.2f} | {r['tau']:.2f} | {r['gamma']} | "
            f"{r['over_plain']:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trained", nargs="*", default=[], metavar="LAYER=DIR")
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llms = exits({int(layer): at for layer, _, at in (item.partition("=") for item in args.trained)})
    pair = LLM(method="draft_model", seed=0, enable_prefix_caching=False)
    llms["the shipped draft model"], plain = pair, pair.with_drafter("none")
    tokenizer = pair.text_tokenizer
    texts = [
        text for both in zip(code_prompts(args.prompts), story_prompts(args.prompts), strict=True) for text in both
    ]
    prompts = [tokenizer(text)["input_ids"] for text in texts[: args.prompts]]
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": asdict(this_machine())}
    parts = []
    for temperature in TEMPERATURES:
        report[f"temperature {temperature:g}"] = result = measure(llms, plain, prompts, temperature, args)
        title = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        parts.append(
            f"**Early exits of the embedded target, {title}, batch 1, {len(prompts)} prompts**\n\n{table(result)}"
        )
        if temperature == 0:
            parts.append(f"Every drafter wrote plain decoding's text on {result['same']} of {len(prompts)} prompts.")
    machine = this_machine()
    parts.append(f"{machine.processor}, {machine.cpu_capability}, {machine.num_threads} threads, {report['date']}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "early-exit.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "early-exit.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
