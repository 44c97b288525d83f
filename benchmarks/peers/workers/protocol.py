"""The protocol between the runner and its workers: JSON lines on standard input and output. Standard library only.

A worker first writes {"ready": versions and settings} or {"error": reason}. Then, for each request line, it writes
{"seconds", "ids", "stats"} or {"error"}. The output of libraries goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

Ids = list[list[int]]


@dataclass(frozen=True)
class Settings:
    """A worker's command line. mode and gamma: only for programs that fix both when they start.

    context: the most tokens of a prompt and its completion. cache_gib: for keys and values.
    """

    models: Path
    precision: str
    threads: int
    batch: int
    mode: str
    gamma: int
    context: int
    cache_gib: int


@dataclass(frozen=True)
class Job:
    """mode: plain, draft_model, ngram, suffix, ... gamma: draft tokens per step. temperature 0 is greedy."""

    prompts: Ids
    max_tokens: int
    mode: str = "plain"
    gamma: int = 0
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Counts:
    """Speculation statistics, summed over the prompts; None if the program does not report them.

    passes: verified rows with or without a draft. spec_steps: those with one. drafted, accepted: draft tokens.
    """

    passes: int | None = None
    spec_steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None


Count = Callable[[], Counts]
Run = Callable[[Job], tuple[Ids, Count]]
"""Writes max_tokens after every prompt, ignoring the end of sequence. It is timed; Count is not."""
Load = Callable[[Settings], tuple[dict[str, str], Callable[[Job], Run]]]
"""-> (versions and settings to report, a function that finds or loads the pipeline of a job's mode)."""


def settings_from_command_line() -> Settings:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--mode", default="plain")
    parser.add_argument("--gamma", type=int, default=0)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cache_gib", type=int, default=1)
    return Settings(**vars(parser.parse_args()))


def serve(load: Load) -> None:
    """Answer requests until standard input ends."""
    answers = _take_over_stdout()
    try:
        facts, pipeline = load(settings_from_command_line())
    except Exception as error:
        _say(answers, {"error": _one_line(error)})
        return
    _say(answers, {"ready": facts})
    for line in sys.stdin:
        try:
            answer = _answer(pipeline, Job(**json.loads(line)))
        except Exception as error:
            answer = {"error": _one_line(error)}
        _say(answers, answer)


def _answer(pipeline: Callable[[Job], Run], job: Job) -> dict[str, Any]:
    run = pipeline(job)  # loading is not timed
    start = time.perf_counter()
    ids, count = run(job)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "ids": ids, "stats": vars(count())}


def _take_over_stdout() -> TextIO:
    """The real standard output; afterwards everything else that prints goes to standard error."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
