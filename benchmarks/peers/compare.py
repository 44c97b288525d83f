"""foredraft compared with the programs people use, on this machine's processor: one run, interleaved.

    python -m benchmarks.peers.compare --setup openvino llamacpp vllm transformers [--models embedded]
    python -m benchmarks.peers.compare [--models embedded|smollm2|smollm2-wide] [--systems foredraft-bf16 openvino-int8 ...]
                               [--prompts 13] [--tokens 64] [--batch 1] [--temperature 0] [--gammas 2 3 4 6] [--no-sweep]
                               [--modes ...] [--suffix NAME]

Models: "embedded" is the embedded target, widened to 0.4 billion parameters without changing its output, with the embedded
draft model, on code prompts; "smollm2" is SmolLM2-135M-Instruct (`make models`) and "smollm2-wide" the same widened to
1.8 billion, both on MT-bench's first turns in the chat template, without a draft model. foredraft also runs the heads that
it ships, widened with their targets, which no other program here can read. All programs get token ids,
decode greedily unless --temperature is given, and ignore the end of sequence, so that all write the same number of tokens.

A system is a program at a precision. It runs in its own process, keeps its models loaded, and idles while others run.
First each system chooses its γ per mode ("auto" chooses at every step), on prompts that are not used again. Then every
system runs once in each mode for every request, in an order that rotates. Times are measured inside the system's process and
include the prefill; prefix caching is off. All use the same number of threads. Figures are medians over requests, ratios are
paired by request, intervals are bootstrapped over requests. With --batch B a request is B prompts at once. A second table
compares foredraft's fastest row with the fastest other program's at the same number of bits.

Four bits: llama.cpp's quantiser makes Q4_0, Q4_1 and Q4_K_M, and OpenVINO's exporter its own format; foredraft runs
llama.cpp's files and its own "int4". All are made from the same bfloat16 checkpoint. llama.cpp comes as a wheel if that uses
all instructions of the processor, and is compiled otherwise (see workers/setup.py); the report names its instructions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common.paths import RESULTS
from benchmarks.common.reports import listed, save
from benchmarks.drafters.embedded_pair_speed import interval, machine
from benchmarks.peers import leads
from benchmarks.peers.contest import Contender, Field, Plan, available_gib
from benchmarks.peers.model_sets import MODEL_SETS, ModelSet, cache_gib, context_for
from benchmarks.peers.systems import HEAD, NAMES, PEERS, PLAIN, Peer, chosen, precisions_of, reference_of
from benchmarks.peers.workers.setup import NAMES as ENVIRONMENT_NAMES
from benchmarks.peers.workers.setup import build_checkpoints, set_up
from foredraft.bench.figures import repeated_share

_SWEEP_REQUESTS = 3
_USUAL_GAMMA = 4
_ENOUGH_GIB = 4.0


def row(contender: Contender, plain: Contender | None, reference: Contender | None, plan: Plan) -> dict[str, Any]:
    """reference: foredraft's plain decoding at the same precision. Texts are compared only if decoding is greedy."""
    written = plan.batch * plan.tokens
    rates = [written / seconds for seconds in contender.seconds]
    compare = plan.temperature == 0
    over_plain = None
    if plain is not None:
        over_plain = [a / b for a, b in zip(plain.seconds, contender.seconds, strict=True)]
    return {
        "system": contender.peer.name,
        "mode": contender.mode,
        "gamma": contender.gamma,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_interval": interval(rates),
        "over_plain": None if over_plain is None else statistics.median(over_plain),
        "over_plain_interval": None if over_plain is None else interval(over_plain),
        "tau": _tau(contender),
        "tokens_per_pass": _tokens_per_pass(contender, written),
        "repeated_8gram_share": statistics.mean(repeated_share(ids) for text in contender.texts for ids in text),
        "same_as_own_plain": _same(contender, plain) if compare else None,
        "same_as_foredraft_plain": _same(contender, reference) if compare else None,
        "seconds": contender.seconds,
        "sweep_seconds": contender.sweep,
    }


def _total(contender: Contender, name: str) -> int | None:
    values = [counts[name] for counts in contender.counts]
    return None if None in values else sum(value or 0 for value in values)


def _tau(contender: Contender) -> float | None:
    """1 + accepted / steps with a draft"""
    accepted, steps = _total(contender, "accepted"), _total(contender, "spec_steps")
    return None if accepted is None or not steps else 1 + accepted / steps


def _tokens_per_pass(contender: Contender, written: int) -> float | None:
    passes = _total(contender, "passes")
    return written * len(contender.seconds) / passes if passes else None


def _same(one: Contender, other: Contender | None) -> float | None:
    """The share of positions at which both have the same token."""
    if other is None:
        return None
    pairs = [
        pair
        for ours, theirs in zip(one.texts, other.texts, strict=True)
        for a, b in zip(ours, theirs, strict=True)
        for pair in zip(a, b, strict=True)
    ]
    return statistics.mean(a == b for a, b in pairs)


def rows(field_: Field) -> list[dict[str, Any]]:
    found = []
    for contender in field_.contenders:
        plain = field_.find(contender.peer.name, PLAIN)
        reference = field_.find(reference_of(contender.peer), PLAIN)
        found.append(row(contender, plain, reference, field_.plan))
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| system | mode | γ | tokens/s | over own plain | τ | tokens per pass | in repeated 8-grams | same as own plain "
        "| same as foredraft plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found:
        low, high = r["tokens_per_second_interval"]
        cells = [
            r["system"],
            r["mode"],
            str(r["gamma"] or ""),
            f"{r['tokens_per_second']:.1f} ({low:.1f} to {high:.1f})",
        ]
        if r["over_plain"] is None:
            cells.append("")
        else:
            low, high = r["over_plain_interval"]
            cells.append(f"{r['over_plain']:.2f} ({low:.2f} to {high:.2f})")
        cells += ["" if r[key] is None else f"{r[key]:.2f}" for key in ("tau", "tokens_per_pass")]
        shares = ("repeated_8gram_share", "same_as_own_plain", "same_as_foredraft_plain")
        cells += ["" if r[key] is None else f"{100 * r[key]:.0f} %" for key in shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    asked = report["asked"]
    how = "greedy" if asked["temperature"] == 0 else f"temperature {asked['temperature']}"
    title = (
        f"**{MODEL_SETS[asked['models']].title}, {how}, batch {asked['batch']}, {asked['requests']} requests of {asked['tokens']} tokens per "
        f"prompt, {asked['threads']} threads**"
    )
    parts = [title, *filter(None, (table(report["rows"]), leads.table(report["rows"])))]
    parts += [f"Skipped, {what}: {reason}" for what, reason in report["skipped"].items()]
    if report["available_gib"] < _ENOUGH_GIB:
        parts.append(
            f"With all loaded only {report['available_gib']:.1f} GiB were left: mapped weights may have had to be read "
            "again. Ask for fewer systems."
        )
    parts += [f"Did not rest: {name} took {100 * share:.0f} % of a processor" for name, share in report["busy"].items()]
    parts += [f"{name}: {listed(facts)}" for name, facts in report["systems"].items()]
    parts.append(listed(report["machine"]))
    return "\n\n".join(parts) + "\n"


def make_plan(args: argparse.Namespace) -> Plan:
    model_set = MODEL_SETS[args.models]
    build_checkpoints(model_set.name, model_set.folder, model_set.parts)
    tokenizer = AutoTokenizer.from_pretrained(model_set.folder / "target")
    ids = model_set.prompts(tokenizer, (args.prompts + _SWEEP_REQUESTS) * args.batch)
    requests = [ids[i : i + args.batch] for i in range(0, len(ids), args.batch)]
    gammas = tuple(args.gammas)
    if args.no_sweep:
        gammas = (_USUAL_GAMMA,) if _USUAL_GAMMA in gammas else gammas[:1]
    context = context_for(max(map(len, ids)) + args.tokens)
    return Plan(
        model_set.folder,
        args.threads,
        args.batch,
        args.tokens,
        args.temperature,
        gammas,
        requests[: args.prompts],
        requests[args.prompts :],
        context,
        cache_gib(model_set.config, context, args.batch),
    )


def run(plan: Plan, model_set: ModelSet, peers: Sequence[Peer], modes: Sequence[str]) -> dict[str, Any]:
    with Field(plan) as field_:
        for peer in peers:
            field_.enter(peer, modes)
        busy = field_.busy()
        memory = field_.memory()
        left = available_gib()
        field_.measure()
        return {
            "machine": machine() | {"threads": plan.threads},
            "systems": field_.facts,
            "asked": {
                "models": model_set.name,
                "requests": len(plan.requests),
                "batch": plan.batch,
                "tokens": plan.tokens,
                "temperature": plan.temperature,
                "gammas": plan.gammas,
                "threads": plan.threads,
            },
            "skipped": field_.skipped,
            "busy": busy,
            "resident_gib": memory,
            "available_gib": left,
            "rows": rows(field_),
        }


def set_up_all(environments: Sequence[str], model_set: ModelSet, peers: Sequence[Peer]) -> None:
    build_checkpoints(model_set.name, model_set.folder, model_set.parts)
    for name in environments:
        set_up(name, model_set.folder, model_set.names, precisions_of(name, peers))


def arguments() -> argparse.Namespace:
    modes = sorted({mode for peer in PEERS for mode in peer.modes})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODEL_SETS, default="embedded")
    parser.add_argument(
        "--setup", nargs="+", choices=ENVIRONMENT_NAMES, help="set up these environments and their models, and exit"
    )
    parser.add_argument(
        "--systems", nargs="+", choices=NAMES, default=NAMES, help="with --setup: systems to convert models for"
    )
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="plain always runs")
    parser.add_argument("--prompts", type=int, default=13, help="number of requests, of --batch prompts each")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--gammas", type=int, nargs="+", default=[2, 3, 4, 6], help="candidates for γ; one alone is simply used"
    )
    parser.add_argument("--no-sweep", action="store_true", help=f"use γ = {_USUAL_GAMMA} everywhere")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--suffix", default="", help="suffix of the result files' names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    model_set, peers = MODEL_SETS[args.models], chosen(args.systems)
    if args.setup:
        set_up_all(args.setup, model_set, peers)
        return
    start = time.monotonic()
    has_drafts = {"draft_model": model_set.has_draft, HEAD: model_set.has_head}
    modes = [PLAIN, *(mode for mode in args.modes if has_drafts.get(mode, True))]
    report = run(make_plan(args), model_set, peers, modes)
    report["minutes"] = (time.monotonic() - start) / 60
    save(report, markdown(report), args.out, "peers", "" if args.models == "embedded" else args.models, args.suffix)


if __name__ == "__main__":
    main()
