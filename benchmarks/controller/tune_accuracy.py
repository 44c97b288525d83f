"""How accurate is tune? Its predictions against what bench measures afterwards, and its advice against an exhaustive sweep.

    python -m benchmarks.controller.tune_accuracy embedded|wide|random [--target DIR] [--budget 120] [--sweep 300] [--out benchmarks/results]

embedded: the embedded pair in bfloat16, greedy. wide: a target with the same output at the cost of a large one (`--target`, made
by a tool that pads a small checkpoint), in int8, with the embedded draft. random: the embedded target with a drafter that
guesses at random; nothing is swept, the advice must be not to speculate.

Each case rewrites its own part of tuning.json, and tuning.md from all of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.paths import RESULTS
from benchmarks.controller.zero_acceptance_drafters import RandomDrafter
from foredraft import LLM
from foredraft.bench import Configuration, run_bench
from foredraft.model import EMBEDDED
from foredraft.tune import TuneResult, run_tune
from foredraft.tune.advise import DEFAULT_TOKENS
from foredraft.tune.measure import settings_for
from foredraft.tune.report import as_dict, sentences
from foredraft.utils.machine import this_machine

MOST = 8


def load(case: str, target: Path | None) -> LLM:
    if case == "wide":
        return LLM(target, EMBEDDED / "draft", quantization="int8")
    return LLM()


def sweep(llm: LLM, result: TuneResult, seconds: float) -> dict[str, dict[str, Any]]:
    """Every drafter and γ, and every setting that tune ran, against plain decoding. Takes the median of the repeats, because a
    shared machine now and then stops for longer than a small model needs for a whole text.
    """
    ran = [one.configuration for one in result.predictions] + [one.configuration for one in result.finalists]
    tried = {configuration.name: configuration for configuration in ran}
    configurations = [Configuration.plain(), *sorted(tried.values(), key=lambda one: one.name)]
    outcome = run_bench(llm, configurations, None, settings_for(None, DEFAULT_TOKENS), budget=seconds)
    return {name: asdict(outcome.typical_speedup(name, "plain")) for name in outcome.names if name != "plain"}


def run(case: str, target: Path | None, budget: float, seconds: float) -> dict[str, Any]:
    started = time.perf_counter()
    llm = load(case, target)
    methods = [RandomDrafter(llm.target.traits.vocab_size)] if case == "random" else None
    result = run_tune(llm, methods, budget=budget - (time.perf_counter() - started))
    took = time.perf_counter() - started
    print(f"{case}: {sentences(result)[0]} ({took:.0f} s)", flush=True)
    swept = {} if case == "random" else sweep(llm, result, seconds)
    return {"tune": as_dict(result), "seconds": took, "sweep": swept, "machine": asdict(this_machine())}


def name_of(one: dict[str, Any]) -> str:
    return f"{one['method']}:{one['speculative_tokens']}"


def errors_of(outcome: dict[str, Any]) -> dict[str, float]:
    """Relative error of every prediction against what the sweep measured; positive if the prediction was too high."""
    sweep = outcome["sweep"]
    return {name_of(p): p["speedup"]["value"] / sweep[name_of(p)]["value"] - 1 for p in outcome["tune"]["predicted"]}


def summary(case: str, outcome: dict[str, Any]) -> list[str]:
    advice = outcome["tune"]["advice"]
    lines = [f"## {case}", "", f"{advice['text']} Tuning took {outcome['seconds']:.0f} s, loading included.", ""]
    sweep = outcome["sweep"]
    if not sweep:
        return lines
    best = max(sweep, key=lambda name: sweep[name]["value"])
    ours = "plain" if not advice["speculate"] else name_of(advice)
    own = 1.0 if ours == "plain" else sweep[ours]["value"]
    errors = errors_of(outcome)
    lines += [
        f"* Advice: {ours}. In the sweep it came to {own:.3f}, the best, {best}, to {sweep[best]['value']:.3f}: "
        f"a shortfall of {1 - own / sweep[best]['value']:.1%}.",
        f"* Expected: {advice['of'][0]['expected_speedup']['value']:.3f}; the sweep measured {own:.3f} "
        f"({advice['of'][0]['expected_speedup']['value'] / own - 1:+.1%}).",
        f"* All {len(errors)} predictions: off by {statistics.median(map(abs, errors.values())):.1%} in the median, "
        f"{max(map(abs, errors.values())):.1%} at most.",
        "",
        "| drafter and γ | predicted | measured by the sweep | off by |",
        "|---|---|---|---|",
    ]
    predicted = {name_of(p): p["speedup"] for p in outcome["tune"]["predicted"]}
    for name, measured in sweep.items():
        one = predicted.get(name)
        cells = (shown(one), shown(measured), f"{errors[name]:+.1%}") if one else ("", shown(measured), "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def shown(ratio: dict[str, Any]) -> str:
    inner = ratio["interval"]
    return f"{ratio['value']:.2f}" + (f" ({inner['low']:.2f} to {inner['high']:.2f})" if inner else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["embedded", "wide", "random"])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--sweep", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.case == "wide" and args.target is None:
        parser.error("wide needs --target DIR")
    file = args.out / "tuning.json"
    everything = json.loads(file.read_text()) if file.exists() else {}
    everything[args.case] = run(args.case, args.target, args.budget, args.sweep)
    file.write_text(json.dumps(everything, indent=1) + "\n")
    parts = ["# tune: predictions and advice against an exhaustive sweep", ""]
    for case, outcome in everything.items():
        parts += summary(case, outcome)
    (args.out / "tuning.md").write_text("\n".join(parts))
    print("\n".join(summary(args.case, everything[args.case])))


if __name__ == "__main__":
    main()
