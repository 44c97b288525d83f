"""The runner's side of a worker: start it, send it jobs, measure its load, end it. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.paths import MODELS, ROOT
from benchmarks.peers.workers.protocol import Job, Settings
from benchmarks.peers.workers.setup import ENVIRONMENTS, python_of

_LOGS = ENVIRONMENTS / "logs"
_PATIENCE = 30
_THREAD_VARIABLES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_")


class WorkerError(RuntimeError):
    """A worker could not start or could not do a job. The message is one line, without paths of this machine."""


class Worker:
    """One worker process. It and its children form a process group."""

    def __init__(self, module: str, environment: str, settings: Settings) -> None:
        _LOGS.mkdir(parents=True, exist_ok=True)
        name = f"{module}-{settings.models.name}-{settings.precision}-{settings.mode}-{settings.gamma}"
        with (_LOGS / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [str(python_of(environment)), "-m", f"benchmarks.peers.workers.{module}", *_arguments(settings)],
                cwd=ROOT,
                env=_variables(environment, settings.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self.facts: dict[str, str] = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, job: Job) -> dict[str, Any]:
        """Run a job. -> seconds, ids, stats. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError("the worker has ended; see its log") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the worker has ended; see its log"}
        if "error" in answer:
            raise WorkerError(answer["error"].replace(str(ROOT), "."))
        return answer

    def processor_seconds(self) -> float:
        """Processor time used so far by the process group."""
        ticks = sum(int(fields[11]) + int(fields[12]) for _, fields in self._group())
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Resident memory of the process group; pages shared with other processes count in proportion."""
        total = 0
        for process, _ in self._group():
            for line in (process / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
        return total

    def _group(self) -> Iterator[tuple[Path, list[str]]]:
        """The /proc folders of the group's processes, with the fields of their `stat` that follow the name, beginning with the state."""
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:  # the process has just ended
                continue
            if int(fields[2]) == self._process.pid:
                yield file.parent, fields

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _arguments(settings: Settings) -> list[str]:
    return [part for name, value in vars(settings).items() for part in (f"--{name}", str(value))]


def _variables(environment: str, threads: int) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_THREAD_VARIABLES)}
    ours |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if environment == "vllm":
        # as vLLM's manual asks; compiled code is kept for the next start
        ours["LD_PRELOAD"] = str(ENVIRONMENTS / environment / "lib" / "libiomp5.so")
        ours["VLLM_CACHE_ROOT"] = str(MODELS / "vllm-cache")
    return ours
