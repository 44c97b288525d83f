"""foredraft beside the programs people use, on this machine's processor: one run, interleaved.

    python -m benchmarks.peers.compare --setup openvino llamacpp vllm transformers
    python -m benchmarks.peers.compare [--systems foredraft-bf16 openvino-int8 ...] [--prompts 13] [--tokens 64] [--batch 1]
                               [--temperature 0] [--gammas 2 3 4 6] [--no-sweep] [--modes ...] [--suffix NAME]

Target: the embedded one widened to 0.4 billion parameters, which writes what the small one writes; draft: the embedded
one. Code prompts as token ids, greedy unless said otherwise, end of sequence ignored, so that all write the same number
of tokens. A system is a program at a precision; it runs in a process of its own, keeps its models loaded, and rests
while another is asked. First each chooses its γ per mode, on prompts that are not used again. Then for every request
every system runs once in each mode, in an order that rotates. Times are a worker's own and include the prompt's
pass; no system keeps prefixes. All use the same number of threads. Figures are medians over requests, ratios are paired
by request, intervals are bootstrapped over requests. With --batch B a request is B prompts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.common.paths import MODELS, RESULTS
from benchmarks.common.prompts import code_prompts
from benchmarks.drafters.embedded_pair_speed import interval, machine
from benchmarks.peers.workers.client import Worker, WorkerError
from benchmarks.peers.workers.protocol import Ids, Job, Settings
from benchmarks.peers.workers.setup import NAMES, build_checkpoints, missing, set_up
from foredraft.bench.figures import repeated_share

PLAIN = "plain"
_SWEEP_REQUESTS = 3
_WARM_UP_TOKENS = 16
_USUAL_GAMMA = 4
_PAUSE = 0.05
_IDLE_SHARE = 0.05
_ENOUGH_GIB = 4.0


@dataclass(frozen=True)
class Peer:
    """A program at a precision. separate: it fixes mode and γ when it starts, so each pair is a process."""

    name: str
    worker: str
    precision: str
    bits: int
    modes: tuple[str, ...] = (PLAIN, "draft_model", "ngram")
    environment: str = ""
    separate: bool = False


PEERS = (
    Peer("foredraft-bf16", "foredraft_worker", "bf16", 16, (PLAIN, "draft_model", "ngram", "suffix", "self-int8")),
    Peer("foredraft-int8", "foredraft_worker", "int8", 8, (PLAIN, "draft_model", "ngram", "suffix")),
    Peer("transformers-bf16", "transformers_worker", "bf16", 16),
    Peer("vllm-bf16", "vllm_worker", "bf16", 16, environment="vllm", separate=True),
    Peer("openvino-fp16", "openvino_worker", "fp16", 16, environment="openvino"),
    Peer("openvino-int8", "openvino_worker", "int8", 8, environment="openvino"),
    Peer("llamacpp-bf16", "llamacpp_worker", "bf16", 16, environment="llamacpp", separate=True),
    Peer("llamacpp-q8_0", "llamacpp_worker", "q8_0", 8, environment="llamacpp", separate=True),
)


@dataclass
class Contender:
    """A system in one mode, at the γ that it runs with, and what it did."""

    peer: Peer
    mode: str
    gamma: int
    worker: Worker
    sweep: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    texts: list[Ids] = field(default_factory=list)
    counts: list[dict[str, int | None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.peer.name, self.mode

    def write(self, prompts: Ids, plan: Plan, seed: int, tokens: int | None = None) -> dict[str, Any]:
        time.sleep(_PAUSE)
        job = Job(prompts, tokens or plan.tokens, self.mode, self.gamma, plan.temperature, seed)
        answer = self.worker.ask(job)
        lengths = {len(ids) for ids in answer["ids"]}
        if lengths != {job.max_tokens}:
            raise WorkerError(f"wrote {sorted(lengths)} tokens instead of {job.max_tokens}")
        return answer

    def measure(self, prompts: Ids, plan: Plan, seed: int) -> None:
        answer = self.write(prompts, plan, seed)
        self.seconds.append(answer["seconds"])
        self.texts.append(answer["ids"])
        self.counts.append(answer["stats"])


@dataclass(frozen=True)
class Plan:
    """What is asked of everyone. gammas: to choose from."""

    threads: int
    batch: int
    tokens: int
    temperature: float
    gammas: tuple[int, ...]
    requests: list[Ids]
    held_out: list[Ids]


class Field:
    """The workers and the contenders that stand for them, and why others do not."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.contenders: list[Contender] = []
        self.facts: dict[str, dict[str, str]] = {}
        self.skipped: dict[str, str] = {}
        self._workers: list[Worker] = []

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def enter(self, peer: Peer, modes: Sequence[str]) -> None:
        """Start a system, warm it up, choose its γs."""
        reason = missing(peer.environment)
        if reason is not None:
            self._skip(peer.name, reason)
            return
        shared: Worker | None = None
        for mode in (mode for mode in peer.modes if mode in modes):
            start = time.monotonic()
            try:
                if not peer.separate and shared is None:
                    shared = self._start(peer, PLAIN, 0)
                best = self._best(peer, mode, shared)
            except WorkerError as error:
                self._skip(f"{peer.name} {mode}", str(error))
                if not peer.separate and shared is None:
                    return  # it does not start at all
                continue
            self.contenders.append(best)
            self.facts[peer.name] = best.worker.facts
            seconds = f"{time.monotonic() - start:.0f} s"
            _say(f"{peer.name} {mode}, {f'γ = {best.gamma}, ' if best.gamma else ''}{seconds}")

    def _skip(self, what: str, reason: str) -> None:
        self.skipped[what] = reason
        _say(f"skipped {what}: {reason}")

    def _start(self, peer: Peer, mode: str, gamma: int) -> Worker:
        plan = self.plan
        settings = Settings(MODELS, peer.precision, plan.threads, plan.batch, mode, gamma)
        worker = Worker(peer.worker, peer.environment, settings)
        self._workers.append(worker)
        return worker

    def _end(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()

    def _best(self, peer: Peer, mode: str, shared: Worker | None) -> Contender:
        """The contender at its fastest γ; the others' own processes end."""
        gammas = (0,) if mode == PLAIN else self.plan.gammas
        sweep: dict[int, float] = {}
        best: Contender | None = None
        for gamma in gammas:
            contender = self._try(peer, mode, gamma, shared, sweep if len(gammas) > 1 else None)
            is_better = best is None or sweep[gamma] < sweep[best.gamma]
            slower = best if is_better else contender
            best = contender if is_better else best
            if shared is None and slower is not None:
                self._end(slower.worker)
        assert best is not None
        best.sweep = sweep
        return best

    def _try(
        self, peer: Peer, mode: str, gamma: int, shared: Worker | None, sweep: dict[int, float] | None
    ) -> Contender:
        """A warm contender; its median time goes to the sweep, if there is one."""
        contender = Contender(peer, mode, gamma, shared or self._start(peer, mode, gamma))
        held_out = self.plan.held_out
        try:
            contender.write(held_out[0], self.plan, 0, min(_WARM_UP_TOKENS, self.plan.tokens))
            if sweep is not None:
                times = [contender.write(prompts, self.plan, i)["seconds"] for i, prompts in enumerate(held_out)]
                sweep[gamma] = statistics.median(times)
        except WorkerError:
            if shared is None:
                self._end(contender.worker)
            raise
        return contender

    def measure(self) -> None:
        """Every contender on every request; one that fails is out."""
        for index, prompts in enumerate(self.plan.requests):
            shift = index % max(1, len(self.contenders))
            for contender in self.contenders[shift:] + self.contenders[:shift]:
                try:
                    contender.measure(prompts, self.plan, index)
                except WorkerError as error:
                    self.contenders.remove(contender)
                    self._skip(" ".join(contender.key), str(error))
            _say(f"request {index + 1} of {len(self.plan.requests)}")

    def find(self, system: str, mode: str) -> Contender | None:
        return next((one for one in self.contenders if one.key == (system, mode)), None)

    def busy(self) -> dict[str, float]:
        """Share of one processor that a system takes while nobody asks it; only those that do not rest."""
        before = [worker.processor_seconds() for worker in self._workers]
        time.sleep(1)
        shares = [worker.processor_seconds() - start for worker, start in zip(self._workers, before, strict=True)]
        names = {id(one.worker): one.peer.name for one in self.contenders}
        found = zip(self._workers, shares, strict=True)
        return {names[id(worker)]: share for worker, share in found if share > _IDLE_SHARE and id(worker) in names}

    def memory(self) -> dict[str, float]:
        """GiB per system; what several have mapped is divided among them."""
        sizes: dict[str, float] = {}
        for worker, name in {id(one.worker): (one.worker, one.peer.name) for one in self.contenders}.values():
            sizes[name] = sizes.get(name, 0) + worker.resident_bytes() / 2**30
        return sizes


def _available_gib() -> float:
    """What could still be had, mapped weights among it."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


def _say(text: str) -> None:
    print(text, flush=True)


@contextmanager
def _field(plan: Plan) -> Iterator[Field]:
    """Whatever happens, no process is left behind."""
    field_ = Field(plan)
    try:
        yield field_
    finally:
        field_.close()


def row(contender: Contender, plain: Contender | None, reference: Contender | None, plan: Plan) -> dict[str, Any]:
    """reference: foredraft's plain decoding at the same precision. Texts are compared only where nothing is drawn."""
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
    """Share of places at which both have the same token."""
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
        ours = "foredraft-bf16" if contender.peer.bits == 16 else "foredraft-int8"
        plain, reference = field_.find(contender.peer.name, PLAIN), field_.find(ours, PLAIN)
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
        f"**Code prompts, {how}, batch {asked['batch']}, {asked['requests']} requests of {asked['tokens']} tokens per "
        f"prompt, {asked['threads']} threads**"
    )
    parts = [title, table(report["rows"])]
    parts += [f"Skipped, {what}: {reason}" for what, reason in report["skipped"].items()]
    if report["available_gib"] < _ENOUGH_GIB:
        parts.append(
            f"With all loaded only {report['available_gib']:.1f} GiB were left: mapped weights may have had to be read "
            "again. Ask for fewer systems."
        )
    parts += [f"Did not rest: {name} took {100 * share:.0f} % of a processor" for name, share in report["busy"].items()]
    parts += [f"{name}: {_listed(facts)}" for name, facts in report["systems"].items()]
    parts.append(_listed(report["machine"]))
    return "\n\n".join(parts) + "\n"


def _listed(facts: dict[str, Any]) -> str:
    return "; ".join(f"{key} {value}" for key, value in facts.items())


def make_plan(args: argparse.Namespace) -> Plan:
    build_checkpoints()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    count = args.prompts + _SWEEP_REQUESTS
    ids = [tokenizer(prompt)["input_ids"] for prompt in code_prompts(count * args.batch)]
    requests = [ids[i : i + args.batch] for i in range(0, len(ids), args.batch)]
    gammas = tuple(args.gammas)
    if args.no_sweep:
        gammas = (_USUAL_GAMMA,) if _USUAL_GAMMA in gammas else gammas[:1]
    return Plan(
        args.threads,
        args.batch,
        args.tokens,
        args.temperature,
        gammas,
        requests[: args.prompts],
        requests[args.prompts :],
    )


def run(plan: Plan, peers: Sequence[Peer], modes: Sequence[str]) -> dict[str, Any]:
    with _field(plan) as field_:
        for peer in peers:
            field_.enter(peer, modes)
        busy = field_.busy()
        memory = field_.memory()
        left = _available_gib()
        field_.measure()
        return {
            "machine": machine() | {"threads": plan.threads},
            "systems": field_.facts,
            "asked": {
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


def arguments() -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    modes = sorted({mode for peer in PEERS for mode in peer.modes})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", nargs="+", choices=NAMES, help="make these environments and models, and stop")
    parser.add_argument("--systems", nargs="+", choices=names, default=names)
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="plain always runs")
    parser.add_argument("--prompts", type=int, default=13, help="requests, of --batch prompts each")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 3, 4, 6], help="one: nothing is chosen")
    parser.add_argument("--no-sweep", action="store_true", help=f"γ = {_USUAL_GAMMA} everywhere")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--suffix", default="", help="of the results' names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.setup:
        set_up(args.setup)
        return
    start = time.monotonic()
    peers = [peer for peer in PEERS if peer.name in args.systems]
    report = run(make_plan(args), peers, [PLAIN, *args.modes])
    report["minutes"] = (time.monotonic() - start) / 60
    name = f"peers-{args.suffix}" if args.suffix else "peers"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
