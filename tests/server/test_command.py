"""foredraft serve: mistakes that are refused before anything is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft import ForedraftError
from foredraft.cli import app
from foredraft.cli.keys import api_keys


def serve(*args: str) -> Any:
    return CliRunner().invoke(app, ["serve", *args], env={"FOREDRAFT_API_KEY": None})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "0.0.0.0"), "FOREDRAFT_API_KEY"),
        (("--host", "::"), "--api-key"),
        (("--host", "nobody.invalid", "--api-key", "x"), "no address"),
        (("--api-key", ""), "empty"),
        (("--max-body", "much"), "not an amount of memory"),
        (("--max-body", "0"), "max_body_bytes"),
        (("--request-timeout", "soon"), "duration"),
        (("--request-timeout", "0"), "request_seconds"),
        (("--log-level", "loud"), "debug, info"),
        (("--chat-template", "no-such-file"), "cannot be read"),
        (("--api-key-file", "no-such-file"), "cannot be read"),
        (("--api-key", "a", "--api-key", ""), "empty"),
        (("--ssl-keyfile", "key.pem"), "--ssl-certfile"),
        (("--ssl-certfile", "no-such-file"), "no such file"),
        (("--allowed-origins", "example.com"), "not an origin"),
        (("--allowed-origins", '["*", "example.com"]'), "'example.com' is not an origin"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_reported_in_one_line(args: tuple[str, ...], words: str) -> None:
    result = serve(*args)
    assert result.exit_code == 2, (result.stderr, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = serve("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2
    assert "cannot listen on this address" in result.stderr


def test_keys_come_from_options_and_a_file_else_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\none two\n\n  three\n")
    monkeypatch.setenv("FOREDRAFT_API_KEY", "four\nfive six\n")
    assert api_keys(["zero"], file) == ("zero", "one two", "three")
    assert api_keys(None, file) == ("one two", "three")
    assert api_keys(["zero"], None) == ("zero",)
    assert api_keys(None, None) == ("four", "five six")
    monkeypatch.delenv("FOREDRAFT_API_KEY")
    assert api_keys(None, None) == ()


@pytest.mark.parametrize(("text", "words"), [("", "contains no keys"), ("# a comment\n\n", "contains no keys")])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ForedraftError, match=words):
        api_keys(["zero"] if not text else None, tmp_path / "keys")


@pytest.mark.parametrize("value", ["", " \n# none"])
def test_an_empty_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FOREDRAFT_API_KEY", value)
    with pytest.raises(ForedraftError, match="FOREDRAFT_API_KEY is empty: set it to a key, or unset it"):
        api_keys(None, None)
