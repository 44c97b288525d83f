"""How long every program takes from the start of its process to the first token of a short prompt.

    python -m benchmarks.peers.loading [--models smollm2] [--systems ...] [--rounds 5] [--suffix NAME]

Set up as for `benchmarks.peers.compare`, with the same models and systems. Programs take turns; a process ends before the next
one starts. The time includes imports, the tokenizer if a program loads one, and the first token. Files are in the page cache
from the second round on. Figures are medians.
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
from benchmarks.drafters.embedded_pair_speed import machine
from benchmarks.peers.contest import say
from benchmarks.peers.model_sets import MODEL_SETS, ModelSet
from benchmarks.peers.systems import NAMES, PLAIN, Peer, chosen
from benchmarks.peers.workers.client import Worker, WorkerError
from benchmarks.peers.workers.protocol import Ids, Job, Settings
from benchmarks.peers.workers.setup import build_checkpoints, missing

_CONTEXT = 1024


def seconds_to_first_token(peer: Peer, model_set: ModelSet, prompts: Ids, threads: int) -> float:
    """Seconds from the start of a new process. Raises WorkerError."""
    start = time.perf_counter()
    worker = Worker(
        peer.worker, peer.environment, Settings(model_set.folder, peer.precision, threads, 1, PLAIN, 0, _CONTEXT, 1)
    )
    try:
        worker.ask(Job(prompts, 1, PLAIN, 0, 0.0, 0))
        return time.perf_counter() - start
    finally:
        worker.close()


def measure(peers: Sequence[Peer], model_set: ModelSet, prompts: Ids, threads: int, rounds: int) -> dict[str, Any]:
    """-> seconds by system, and why other systems were skipped"""
    reasons = {peer.name: missing(peer.environment) for peer in peers}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    seconds: dict[str, list[float]] = {}
    for index in range(rounds):
        for peer in peers:
            if peer.name in skipped:
                continue
            try:
                seconds.setdefault(peer.name, []).append(seconds_to_first_token(peer, model_set, prompts, threads))
            except WorkerError as error:
                skipped[peer.name] = str(error)
        say(f"round {index + 1} of {rounds}")
    return {"seconds": {name: each for name, each in seconds.items() if name not in skipped}, "skipped": skipped}


def markdown(report: dict[str, Any]) -> str:
    lines = [f"**Start to first token, {report['models']}, {report['machine']['threads']} threads**", ""]
    lines += ["| system | seconds | fastest | slowest |", "|---|---|---|---|"]
    for name, each in report["seconds"].items():
        lines.append(f"| {name} | {statistics.median(each):.1f} | {min(each):.1f} | {max(each):.1f} |")
    lines += ["", *(f"Skipped {name}: {reason}" for name, reason in report["skipped"].items())]
    return "\n".join([*lines, listed(report["machine"])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=MODEL_SETS, default="smollm2")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--suffix", default="", help="suffix of the result files' names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    model_set = MODEL_SETS[args.models]
    build_checkpoints(model_set.name, model_set.folder, model_set.parts)
    prompts = model_set.prompts(AutoTokenizer.from_pretrained(model_set.folder / "target"), 1)
    report: dict[str, Any] = {"models": model_set.name, "machine": machine() | {"threads": args.threads}}
    report |= measure(chosen(args.systems), model_set, prompts, args.threads, args.rounds)
    save(report, markdown(report), args.out, "loading", args.models, args.suffix)


if __name__ == "__main__":
    main()
