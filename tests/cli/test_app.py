"""What all commands have in common: help, the version, exit codes and streams."""

from __future__ import annotations

import json
import signal

import pytest

import foredraft
from tests.command_line import PROMPT, QUICK, piped, run

ENDLESS = ("generate", PROMPT, "--max-tokens", "1900", "--ignore-eos", *QUICK)


def test_the_version_is_printed() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"foredraft {foredraft.__version__}\n")


@pytest.mark.parametrize("command", [(), ("generate",), ("chat",), ("demo",), ("inspect",)])
def test_help_is_printed(command: tuple[str, ...]) -> None:
    assert run(*command, "--help").exit_code == 0


@pytest.mark.slow
def test_standard_output_only_has_json() -> None:
    with piped("generate", PROMPT, "--json", "--max-tokens", "4", *QUICK) as process:
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0
    assert len(json.loads(stdout)["token_ids"]) == 4
    assert stderr == b""  # no progress bars, no warnings of libraries


def test_a_mistake_gives_no_traceback() -> None:
    with piped("generate", PROMPT, "--model", "/nowhere/at/all") as process:
        stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (2, b"")
    assert stderr.startswith(b"error: /nowhere/at/all")
    assert stderr.count(b"\n") == 1


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_quietly() -> None:
    with piped(*ENDLESS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=300) == 141
        assert process.stderr.read() == b""


@pytest.mark.slow
def test_an_interrupt_ends_a_command_with_130() -> None:
    with piped(*ENDLESS) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
