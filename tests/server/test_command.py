"""foredraft serve: what it refuses before anything is loaded."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app


def serve(*args: str) -> Any:
    return CliRunner().invoke(app, ["serve", *args], env={"FOREDRAFT_API_KEY": None})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), "FOREDRAFT_API_KEY"),
        (("--host", "::"), "--api-key"),
        (("--host", "nobody.invalid", "--api-key", "x"), "no address"),
        (("--api-key", ""), "empty"),
        (("--max-body", "much"), "no amount of memory"),
        (("--max-body", "0"), "max_body_bytes"),
        (("--request-timeout", "soon"), "duration"),
        (("--request-timeout", "0"), "request_seconds"),
        (("--log-level", "loud"), "debug, info"),
        (("--chat-template", "no-such-file"), "cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_told_in_one_line(args: tuple[str, ...], words: str) -> None:
    result = serve(*args)
    assert result.exit_code == 2, (result.stderr, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = serve("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "cannot listen there" in result.stderr
