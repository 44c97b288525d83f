"""Tries grammars in a separate process: run as a script by `trials`, imports nothing but llguidance.

Reads jobs and writes answers, one JSON object per line. Each job gets a child process with limits on processor time, memory and
stack, since llguidance cannot be interrupted: some schemas compile for minutes, and rules nested thousands deep overflow the
stack, which ends the process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_BYTES = LLTokenizer("byte")  # the cost of a compilation hardly depends on the vocabulary
_MAX_ERROR = 2000


def main() -> None:
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """{"bytes": ...}, {"error": ...}, or {"signal": ...} for a child that was killed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        _run_child(job, write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        output = pipe.read()
    _, status = os.waitpid(pid, 0)
    answer: dict[str, Any] = json.loads(output) if output else {"signal": os.WTERMSIG(status)}
    return answer


def _run_child(job: dict[str, Any], write_end: int) -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"] + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (job["max_bytes"], job["max_bytes"]))
    threading.stack_size(job["stack_bytes"])
    thread = threading.Thread(target=_try, args=(job, write_end))
    thread.start()
    thread.join()
    os._exit(0)


def _try(job: dict[str, Any], write_end: int) -> None:
    before = _peak_bytes()
    try:
        matcher = LLMatcher(_BYTES, job["text"], log_level=0, limits=LLParserLimits(**job["limits"]))
        error = _problem_of(matcher, job["max_forced_bytes"])
        answer: dict[str, Any] = {"error": error[:_MAX_ERROR]} if error else {"bytes": _peak_bytes() - before}
    except BaseException as caught:  # a panic of the library is not an Exception
        answer = {"error": f"{type(caught).__name__}: {caught}"[:_MAX_ERROR]}
    os.write(write_end, json.dumps(answer).encode())


def _problem_of(matcher: LLMatcher, max_forced_bytes: int) -> str:
    """Why the grammar cannot be used; "" if it can."""
    bits = matcher.compute_bitmask()
    if not matcher.is_error() and not any(bits):
        return "NoExtension"
    forced = b"" if matcher.is_error() else matcher.compute_ff_bytes()
    if len(forced) > max_forced_bytes:
        return f"every text begins with the same {len(forced)} bytes, but at most {max_forced_bytes} are allowed"
    if forced and not matcher.is_error():
        matcher.try_consume_tokens(list(forced))
        if not matcher.is_error() and not matcher.is_stopped():
            matcher.compute_bitmask()
    return matcher.get_error() if matcher.is_error() else ""


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    main()
