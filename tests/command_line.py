"""Run commands in tests: in this process, in a process of their own, or in a terminal."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import foredraft
from foredraft.__main__ import main
from foredraft.cli import app

PROMPT = "def read_lines(path):"


QUICK = ("--num-threads", "1")


COMMAND = (sys.executable, "-m", "foredraft.cli")


def run(*args: str | Path, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def generate(*args: str | Path, stdin: str | bytes | None = None) -> Any:
    return run("generate", *args, *QUICK, stdin=stdin)


def json_lines(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_refused(result: Any, *words: str) -> None:
    """Assert that the command printed a one-line reason, exited with code 2 and wrote no output."""
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def environment() -> dict[str, str]:
    source = str(Path(foredraft.__file__).parents[1])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
    return {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")} | {
        "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""
    }  # fmt: skip


def forked_commands() -> ForkServerContext:
    """A context whose processes are forked from one that has already imported everything, which would take each of them ten seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["foredraft.cli", "foredraft.cli.train", "foredraft.train", "transformers.models.llama"]
    )
    return context


def run_command(args: Sequence[str], errors: Path) -> None:
    """Run foredraft in the current process, which was started for it. errors: the file to write standard error to."""
    with errors.open("w") as stream:
        os.dup2(stream.fileno(), sys.stderr.fileno())
    sys.argv = ["foredraft", *args]
    main()


def heed_interrupts() -> None:
    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def started(*args: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*COMMAND, *map(str, args)], env=environment(), preexec_fn=heed_interrupts, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def piped(*args: str | Path) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return started(*args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@contextlib.contextmanager
def in_a_terminal(*args: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[bytes], None], Any]]:
    """Yields the process, a function that types, and a function that reads the screen until a condition holds."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read_until(enough: Callable[[bytes], bool], seconds: float = 300) -> bytes:
        end = time.monotonic() + seconds
        while not enough(bytes(shown)):
            assert time.monotonic() < end, bytes(shown)
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    shown.extend(os.read(ours, 4096))
                except OSError:  # the other side is closed
                    break
        return bytes(shown)

    def type_in(text: bytes) -> None:
        shown.clear()
        os.write(ours, text)

    with started(*args, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        try:
            yield process, type_in, read_until
        finally:
            os.close(ours)
