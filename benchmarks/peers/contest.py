"""Run systems in turn: start the workers, let each choose its γ, then run every request once on every system and mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.systems import PLAIN, WITHOUT_GAMMA, Peer
from benchmarks.peers.workers.client import Worker, WorkerError
from benchmarks.peers.workers.protocol import Ids, Job, Settings
from benchmarks.peers.workers.setup import missing

_WARM_UP_TOKENS = 16
_PAUSE = 0.05
_IDLE_SHARE = 0.05


@dataclass
class Contender:
    """A system in one mode, at its γ, and its measurements."""

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
    """The settings that all systems share. gammas: the candidates for γ. context, cache_gib: see Settings."""

    models: Path
    threads: int
    batch: int
    tokens: int
    temperature: float
    gammas: tuple[int, ...]
    requests: list[Ids]
    held_out: list[Ids]
    context: int = 1024
    cache_gib: int = 1


class Field:
    """The workers, the contenders that run on them, and the reasons why others were skipped."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.contenders: list[Contender] = []
        self.facts: dict[str, dict[str, str]] = {}
        self.skipped: dict[str, str] = {}
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close all workers, whatever happened."""
        for worker in self._workers:
            worker.close()

    def enter(self, peer: Peer, modes: Sequence[str]) -> None:
        """Start a system, warm it up, and choose its γ for each mode."""
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
                    return  # the program does not start at all
                continue
            self.contenders.append(best)
            self.facts[peer.name] = best.worker.facts
            seconds = f"{time.monotonic() - start:.0f} s"
            say(f"{peer.name} {mode}, {f'γ = {best.gamma}, ' if best.gamma else ''}{seconds}")

    def _skip(self, what: str, reason: str) -> None:
        self.skipped[what] = reason
        say(f"skipped {what}: {reason}")

    def _start(self, peer: Peer, mode: str, gamma: int) -> Worker:
        plan = self.plan
        settings = Settings(
            plan.models, peer.precision, plan.threads, plan.batch, mode, gamma, plan.context, plan.cache_gib
        )
        worker = Worker(peer.worker, peer.environment, settings)
        self._workers.append(worker)
        return worker

    def _end(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.close()

    def _best(self, peer: Peer, mode: str, shared: Worker | None) -> Contender:
        """The contender at its fastest γ. The processes of slower contenders are closed unless shared."""
        gammas = (0,) if mode in WITHOUT_GAMMA else self.plan.gammas
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
        """A warmed-up contender. Its median time is added to the sweep, if there is one."""
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
        """Run every contender on every request; a contender that fails is skipped from then on."""
        for index, prompts in enumerate(self.plan.requests):
            shift = index % max(1, len(self.contenders))
            for contender in self.contenders[shift:] + self.contenders[:shift]:
                try:
                    contender.measure(prompts, self.plan, index)
                except WorkerError as error:
                    self.contenders.remove(contender)
                    self._skip(" ".join(contender.key), str(error))
            say(f"request {index + 1} of {len(self.plan.requests)}")

    def find(self, system: str, mode: str) -> Contender | None:
        return next((one for one in self.contenders if one.key == (system, mode)), None)

    def busy(self) -> dict[str, float]:
        """The share of one processor that each system takes while idle, for those above the limit."""
        before = [worker.processor_seconds() for worker in self._workers]
        time.sleep(1)
        shares = [worker.processor_seconds() - start for worker, start in zip(self._workers, before, strict=True)]
        names = {id(one.worker): one.peer.name for one in self.contenders}
        found = zip(self._workers, shares, strict=True)
        return {names[id(worker)]: share for worker, share in found if share > _IDLE_SHARE and id(worker) in names}

    def memory(self) -> dict[str, float]:
        """GiB per system; memory that several processes map is divided among them."""
        sizes: dict[str, float] = {}
        for worker, name in {id(one.worker): (one.worker, one.peer.name) for one in self.contenders}.values():
            sizes[name] = sizes.get(name, 0) + worker.resident_bytes() / 2**30
        return sizes


def available_gib() -> float:
    """Memory that could still be allocated, including mapped weights that could be dropped."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


def say(text: str) -> None:
    print(text, flush=True)
