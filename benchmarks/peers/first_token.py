"""Every program's time to first token for a long prompt, and for a batch of them: one run, interleaved.

    python -m benchmarks.peers.first_token [--models smollm2] [--systems ...] [--cases 512x1 4096x1 512x16 512x32]
                               [--repeats 3] [--suffix NAME]

Set up as for `benchmarks.peers.compare`, with the same models and systems. A case is LENGTHxBATCH: BATCH prompts of LENGTH
tokens at once, made of MT-bench's questions and beginning differently. The time is measured inside the program's process, for
one token of each prompt, so in a batch it is the time until the last prompt has its token. For each case all systems are
started with enough memory for it and warmed up; then they take turns. Figures are medians over repeats, each with other
prompts. The last column is the prompts' multiplications (all matrices for every token, attention to all tokens before, the
lm_head once per prompt) over the time, to be compared with the processor's peak.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from benchmarks.common.paths import RESULTS
from benchmarks.common.reports import listed, save
from benchmarks.drafters.embedded_pair_speed import interval, machine
from benchmarks.peers.contest import Contender, Field, Plan, say
from benchmarks.peers.model_sets import (
    MODEL_SETS,
    ModelSet,
    cache_gib,
    context_for,
    long_prompts,
    prompt_multiplications,
)
from benchmarks.peers.systems import NAMES, PLAIN, Peer, chosen
from benchmarks.peers.workers.setup import build_checkpoints

_COLUMNS = ("system", "prompt tokens", "batch", "seconds", "prompt tokens/s", "billion multiplications/s")


class Case(NamedTuple):
    """Prompts of `length` tokens, `batch` at once."""

    length: int
    batch: int


def parse_case(text: str) -> Case:
    """Parse LENGTHxBATCH. Raises ValueError."""
    length, batch = map(int, text.split("x"))
    if length < 1 or batch < 1:
        raise ValueError(f"{text}: give LENGTHxBATCH, as 512x16")
    return Case(length, batch)


def make_plan(model_set: ModelSet, tokenizer: Any, case: Case, repeats: int, threads: int) -> Plan:
    """Raises ValueError for a length that exceeds the models' context."""
    most = model_set.config["max_position_embeddings"]
    if case.length >= most:
        raise ValueError(f"{model_set.name} has a context of {most} tokens: no prompts of {case.length}")
    ids = long_prompts(tokenizer, case.length, case.batch * (repeats + 1))
    requests = [ids[i : i + case.batch] for i in range(0, len(ids), case.batch)]
    context = min(context_for(case.length + 1), most)
    memory = cache_gib(model_set.config, context, case.batch)
    return Plan(model_set.folder, threads, case.batch, 1, 0.0, (), requests[1:], requests[:1], context, memory)


def row(contender: Contender, case: Case, multiplications: int) -> dict[str, Any]:
    seconds = statistics.median(contender.seconds)
    return {
        "system": contender.peer.name,
        "length": case.length,
        "batch": case.batch,
        "seconds": seconds,
        "seconds_interval": interval(contender.seconds),
        "prompt_tokens_per_second": case.length * case.batch / seconds,
        "billion_multiplications_per_second": multiplications * case.batch / seconds / 1e9,
    }


def measure(model_set: ModelSet, peers: Sequence[Peer], case: Case, plan: Plan) -> dict[str, Any]:
    """-> rows, skipped systems and why, facts about systems"""
    with Field(plan) as field:
        for peer in peers:
            field.enter(peer, [PLAIN])
        field.measure()
        multiplications = prompt_multiplications(model_set.config, case.length)
        rows = [row(contender, case, multiplications) for contender in field.contenders]
        return {"rows": rows, "skipped": field.skipped, "systems": field.facts}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for r in rows:
        low, high = r["seconds_interval"]
        cells = [r["system"], str(r["length"]), str(r["batch"]), f"{r['seconds']:.3f} ({low:.3f} to {high:.3f})"]
        cells += [f"{r['prompt_tokens_per_second']:.0f}", f"{r['billion_multiplications_per_second']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    parts = [f"**Time to the first token, {report['models']}, {report['machine']['threads']} threads**"]
    parts.append(table([row for case in report["cases"] for row in case["rows"]]))
    for case in report["cases"]:
        parts += [f"Skipped at {case['case']}, {what}: {reason}" for what, reason in case["skipped"].items()]
    systems: dict[str, dict[str, str]] = {}
    for case in report["cases"]:
        systems |= case["systems"]
    parts += [f"{name}: {listed(facts)}" for name, facts in systems.items()]
    return "\n\n".join([*parts, listed(report["machine"])]) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODEL_SETS, default="smollm2")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=NAMES)
    default = [Case(512, 1), Case(4096, 1), Case(512, 16), Case(512, 32)]
    parser.add_argument("--cases", type=parse_case, nargs="+", default=default, metavar="LENGTHxBATCH")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--suffix", default="", help="suffix of the result files' names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    start = time.monotonic()
    model_set = MODEL_SETS[args.models]
    build_checkpoints(model_set.name, model_set.folder, model_set.parts)
    tokenizer = AutoTokenizer.from_pretrained(model_set.folder / "target")
    try:
        plans = [(case, make_plan(model_set, tokenizer, case, args.repeats, args.threads)) for case in args.cases]
    except ValueError as error:
        sys.exit(f"error: {error}")
    cases = []
    for case, plan in plans:
        name = f"{case.length}x{case.batch}"
        say(f"case {name}")
        cases.append({"case": name, **measure(model_set, chosen(args.systems), case, plan)})
    report: dict[str, Any] = {
        "models": model_set.name,
        "machine": machine() | {"threads": args.threads},
        "cases": cases,
    }
    report["minutes"] = (time.monotonic() - start) / 60
    save(report, markdown(report), args.out, "first-token", args.models, args.suffix)


if __name__ == "__main__":
    main()
