"""foredraft draft-server, and commands that use one."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from foredraft.model import EMBEDDED
from foredraft.remote import VARIABLE
from tests.command_line import PROMPT, assert_refused, generate, json_lines, run, started
from tests.draft_servers import KEY, key_file
from tests.heads.random_heads import embedded_head


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY.decode())


def test_a_draft_server_needs_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE)
    assert_refused(run("draft-server", "--method", "suffix"), VARIABLE, "holds no key", "openssl rand -hex 32")
    empty = tmp_path / "key"
    empty.touch()
    assert_refused(run("draft-server", "--method", "suffix", "--key-file", empty), str(empty), "holds no key")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "eagle"), ("eagle", "target's process")),
        (("--method", "early_exit"), ("early_exit", "target's process")),
        (("--method", "self-int8"), ("--draft-model TARGET --quantization int8",)),
        (("--method", "suffix+ngram"), ("one method", "suffix+remote")),
        (("--method", "draft_model"), ("needs a draft model",)),
        (("--draft-model", "/nowhere"), ("/nowhere",)),
        (("--ray", "--port", "0"), ("--port 0", "--ray")),
        (("--ray-address", "auto"), ("--ray",)),
        (("--quantization", "int3"), ("int3",)),
    ],
)
def test_methods_that_cannot_be_remote_are_refused_by_name(options: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(run("draft-server", *options), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft-server", "there"), ("tcp://127.0.0.1:5757", "there")),
        (("--draft-server-max-wait", "1s"), ("--draft-server",)),
        (("--draft-server-key-file", "key"), ("--draft-server",)),
        (("--method", "remote"), ('method "remote" needs a draft server',)),
        (("--draft-server", "tcp://127.0.0.1:1", "--method", "suffix"), ('the method "remote"', '"suffix"')),
        (("--draft-server", "tcp://127.0.0.1:1", "--draft-server-max-wait", "0s"), ("above 0",)),
    ],
)
def test_bad_draft_server_options_of_clients_are_refused_by_name(
    options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(generate(PROMPT, *options), *words)


@pytest.mark.slow
def test_a_head_is_recognised_by_its_files() -> None:
    assert_refused(run("draft-server", "--draft-model", embedded_head("medusa")), "medusa", "target's process")


@pytest.mark.slow
def test_ctrl_c_prints_nothing() -> None:
    """The process that drafts ends in order, and so leaves no semaphore that Python would warn of."""
    draft = EMBEDDED / "draft"
    with started("draft-server", "--draft-model", draft, "--port", "0", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"drafting at")
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == b""
        assert process.wait(60) == 130


@pytest.mark.slow
def test_drafts_from_another_process_do_not_change_the_text() -> None:
    with started(
        "draft-server", "--method", "suffix", "--port", "0", "--key-file", key_file(), stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        found = re.fullmatch(r"drafting at (tcp://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        options = ("--temperature", "0", "--max-tokens", "60", "--json")
        (plain,) = json_lines(generate(PROMPT, "--method", "none", *options))
        server = ("--draft-server", found[1], "--draft-server-max-wait", "1s", "--speculative-tokens", "4")
        (drafted,) = json_lines(generate(PROMPT, *server, *options))
        assert drafted["token_ids"] == plain["token_ids"]
        assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
