"""Tries in other processes whether a grammar can be compiled, since llguidance may crash or not return."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import weakref
from pathlib import Path
from queue import LifoQueue
from signal import SIGABRT, SIGKILL, SIGXCPU
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.text.grammar.limits import GrammarLimits

_WORKER = Path(__file__).with_name("worker.py")
_NUM_WORKERS = 2
_BASE_BYTES = 64 * 2**20  # memory of a worker before its first grammar


class Refused(Exception):
    """A grammar cannot be used; the message is llguidance's or ours."""


class Trials:
    """Compiles grammars in two worker processes, which are started on first use and end with this object.

    Thread-safe; a third thread waits for a free worker.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._idle: LifoQueue[_Worker] = LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._idle.put(_Worker())

    def run(self, text: str, parser_limits: dict[str, int]) -> int:
        """-> the memory of the compiled grammar, in bytes. Raises Refused."""
        limits = self._limits
        job = {
            "text": text,
            "limits": parser_limits,
            "cpu_seconds": limits.compile_seconds,
            "max_bytes": limits.compile_bytes + _BASE_BYTES,
            "stack_bytes": limits.stack_bytes,
            "max_forced_bytes": limits.forced_bytes,
        }
        worker = self._idle.get()
        try:
            answer = worker.run(job)
        finally:
            self._idle.put(worker)
        if "signal" in answer:
            raise Refused(self._why_killed(answer["signal"]))
        if "error" in answer:
            raise Refused(answer["error"])
        return int(answer["bytes"])

    def _why_killed(self, signal: int) -> str:
        if signal in (SIGXCPU, SIGKILL):
            return f"it takes more than {self._limits.compile_seconds} s of processor time to compile: make it smaller"
        if signal == SIGABRT:
            return f"it takes more than {self._limits.compile_bytes >> 20} MiB to compile: make it smaller"
        return "its rules or schemas are nested too deeply to compile: make them flatter"


class _Worker:
    """One process, for one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(job).encode() + b"\n"
        for _ in range(2):  # the process may have been killed meanwhile
            process = self._process if self._process and self._process.poll() is None else self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                output = process.stdout.readline()
            except BrokenPipeError:
                output = b""
            if output:
                answer: dict[str, Any] = json.loads(output)
                return answer
            self._process = None
            _end(process)
        raise ForedraftError(
            "structured_outputs: the process that compiles grammars cannot be run: make sure that it is allowed to start"
        )

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: do not import from the script's folder. A new session: Ctrl-C goes to the parent alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
