"""foredraft check: its output and its exit code."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from foredraft import DraftRequest, Proposal
from tests.command_line import assert_refused, json_lines, run


@pytest.mark.slow
def test_check_reports_that_it_passed(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def fibonacci(n):\nOnce upon a time\nclass Queue:\nThe dog saw a cat. The cat\n")
    options = ("check", "--prompts", prompts, "--temperature", "0", "--max-tokens", "24")
    (found,) = json_lines(run(*options, "--json"))
    assert found["verdict"] == "passed"
    assert {one["name"] for one in found["checks"]} == {"identity", "teacher-forced"}
    assert found["warnings"] == []
    assert found["controls"]
    assert all(control["rejected"] for control in found["controls"])
    result = run(*options)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "verdict: passed"


def test_checks_exit_code_says_that_it_did_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from foredraft.certificate import controls
    from foredraft.verify import verify

    monkeypatch.setattr(controls, "CONTROLS", (replace(controls.CONTROLS[0], verifier=verify),))
    result = run("check", "--temperature", "0", "--max-tokens", "8", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["verdict"] == "inconclusive"
    assert "accept all" in found["reason"]


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--budget", "0"), "budget"), (("--prompts", "nowhere.txt"), "nowhere.txt"), (("--method", "magic"), "magic")],
)
def test_check_refuses_mistakes(options: tuple[str, ...], word: str) -> None:
    assert_refused(run("check", *options), word)


def test_check_warns_about_a_drafter_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from foredraft.drafters.ngram import NgramDrafter

    propose, num_calls = NgramDrafter.propose, itertools.count(1)

    def fails_at_first(self: NgramDrafter, requests: list[DraftRequest]) -> Proposal:
        if next(num_calls) == 1:
            raise ValueError("broken")
        return propose(self, requests)

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def fibonacci(n):\nThe dog saw a cat. The cat\n")
    options = ("check", "--method", "ngram", "--prompts", prompts, "--temperature", "0", "--max-tokens", "16")
    monkeypatch.setattr(NgramDrafter, "propose", fails_at_first)
    result = run(*options, "--json")
    (warning,) = json.loads(result.stdout)["warnings"]
    assert warning.startswith("drafter ngram failed (1×)")
    num_calls = itertools.count(1)
    assert f"warning: {warning}" in run(*options).stdout.splitlines()
