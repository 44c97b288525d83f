"""Mistakes are reported in one line with exit code 2, alike in every command, and before anything slow is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.model.checkpoint import EMBEDDED
from tests.command_line import assert_refused, run

TEXT = EMBEDDED / "MODEL_CARD.md"
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "x"),
    "chat": ("chat", "--chat-template", str(TEXT)),
    "demo": ("demo",),
    "inspect": ("inspect",),
    "bench": ("bench",),
    "tune": ("tune",),
    "serve": ("serve", "--port", "0"),
    "check": ("check",),
    "evaluate": ("train", "evaluate", "--target", f"{EMBEDDED}/target", "--draft", f"{EMBEDDED}/draft", "--data", f"t={TEXT}"),
    "lm": ("train", "lm", "--out", "out", "--data", str(TEXT), "--init", f"{EMBEDDED}/draft", "--steps", "1"),
    "distill": ("train", "distill", "--target", f"{EMBEDDED}/target", "--out", "out", "--data", str(TEXT), "--steps", "1"),
}  # fmt: skip
HEAVY = ("torch", "transformers", "numpy", "scipy", "sympy", "pandas", "matplotlib", "fastapi", "trimesh", "sklearn")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shell(commands: Sequence[Sequence[str]], folder: Path) -> list[dict[str, Any]]:
    """Run commands one after the other in one new process. -> for each its exit code, its output, and the slow modules that were
    imported by then"""
    script = f"""
import contextlib, io, json, sys
from foredraft.__main__ import main
for command in json.load(sys.stdin):
    sys.argv, code, out, err = ["foredraft", *command], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as exit:
            code = exit.code
    imported = [name for name in {HEAVY!r} if name in sys.modules]
    print(json.dumps(dict(code=code, out=out.getvalue(), err=err.getvalue(), imported=imported)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(foredraft.__file__).parents[1])},
        cwd=folder,
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


EARLY: dict[str, tuple[str, ...]] = {
    "model": (*COMMANDS["generate"], "--model", "/nowhere"),
    "draft": (*COMMANDS["generate"], "--draft-model", "/nowhere"),
    "prompts": ("generate", "--prompts", "/nowhere.txt"),
    "method": (*COMMANDS["generate"], "--method", "magic"),
    "draft model that is not there": (*COMMANDS["generate"], "--model", f"{EMBEDDED}/target", "--method", "draft_model"),
    "tokens": (*COMMANDS["generate"], "--speculative-tokens", "many"),
    "temperature": (*COMMANDS["generate"], "--temperature", "-1"),
    "dtype": (*COMMANDS["generate"], "--dtype", "int3"),
    "quantization": (*COMMANDS["generate"], "--quantization", "int3"),
    "threads": (*COMMANDS["generate"], "--num-threads", "100000"),
    "verification": (*COMMANDS["generate"], "--verification", "trust"),
    "trace": (*COMMANDS["generate"], "--trace", "/nowhere/trace.jsonl"),
    "head settings": (*COMMANDS["generate"], "--head-settings", "norm_output=true"),
    "head window": (*COMMANDS["generate"], "--head-window", "-1"),
    "settings": (*COMMANDS["generate"], "--config", "/nowhere.toml"),
    "chat": ("chat", "--model", "/nowhere"),
    "demo": ("demo", "--model", "/nowhere"),
    "inspect": ("inspect", "--model", "/nowhere"),
    "unknown option": ("generate", "hi", "--bogus"),
    "unknown option of all commands": ("--bogus",),
    "unknown command": ("train", "nothing"),
    "bench model": ("bench", "--model", "/nowhere"),
    "bench budget": ("bench", "--budget", "0"),
    "bench workload": ("bench", "--workload", "/nowhere.jsonl"),
    "bench configuration": ("bench", "--config", "plain:3"),
    "tune model": ("tune", "--model", "/nowhere"),
    "tune budget": ("tune", "--budget", "-1s"),
    "tune output": ("tune", "--output", "/nowhere/settings.toml"),
    "check model": ("check", "--model", "/nowhere"),
    "check budget": ("check", "--budget", "nan"),
    "check dtype": ("check", "--dtype", "int3"),
    "serve model": ("serve", "--model", "/nowhere"),
    "evaluate target": ("train", "evaluate", "--target", "/nowhere", "--draft", f"{EMBEDDED}/draft", "--data", f"t={TEXT}"),
    "evaluate data": (*COMMANDS["evaluate"], "--data", "u=/nowhere.txt"),
    "lm data": ("train", "lm", "--out", "out", "--data", "/nowhere.txt", "--steps", "1"),
    "distill target": ("train", "distill", "--target", "/nowhere", "--out", "out", "--data", str(TEXT)),
}  # fmt: skip


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return dict(zip(EARLY, shell(list(EARLY.values()), tmp_path_factory.mktemp("early")), strict=True))


@pytest.mark.parametrize("name", EARLY)
def test_a_mistake_is_reported_before_anything_slow_is_imported(early: dict[str, dict[str, Any]], name: str) -> None:
    done = early[name]
    assert (done["code"], done["out"]) == (2, "")
    (error,) = done["err"].splitlines()
    assert error.startswith("error: ")
    assert done["imported"] == []


@pytest.mark.parametrize("budget", ["0", "0s", "-5s", "nan", "inf", "1e99s", "soon"])
@pytest.mark.parametrize("command", ["bench", "tune", "evaluate", "lm", "distill"])
def test_a_too_small_budget_is_refused(command: str, budget: str) -> None:
    assert_refused(run(*COMMANDS[command], f"--budget={budget}"))


@pytest.mark.parametrize("command", COMMANDS)
def test_more_threads_than_the_machine_can_run_are_refused(command: str) -> None:
    assert_refused(run(*COMMANDS[command], "--num-threads", "1000000"), "num_threads", "cores")
    assert torch.get_num_threads() < 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_device_is_refused_in_one_line(command: str) -> None:
    assert_refused(run(*COMMANDS[command], "--device", "cuda"), "device cuda", "cpu")


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "inspect", "bench", "tune", "serve"])
def test_an_adapter_is_refused_as_such(command: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "someone/base"}))
    for option in ("--model", "--draft-model"):
        assert_refused(run(*COMMANDS[command], option, tmp_path), "LoRA", "merge_and_unload")


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "bench", "tune"])
def test_common_options_are_in_every_command(command: str) -> None:
    shown = run(command, "--help").stdout
    assert "--cache-memory" in shown
    assert ("--verification" in shown) == (command != "demo")
    assert_refused(run(*COMMANDS[command], "--cache-memory", "much"), "memory")


def test_cache_memory_and_verification_are_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    from foredraft.llm import LLM

    seen: dict[str, Any] = {}
    original = LLM.generate

    def watch(self: LLM, prompts: Any, params: Any, **settings: Any) -> Any:
        seen.update(memory=self.engine.pool.total, verification=params.verification)
        return original(self, prompts, params, **settings)

    monkeypatch.setattr(LLM, "generate", watch)
    options = ("--cache-memory", "32MiB", "--verification", "rejection", "--max-tokens", "3", "--json")
    result = run(*COMMANDS["generate"], *options)
    assert result.exit_code == 0, result.stderr
    assert seen == {"memory": 32 * 2**20, "verification": "rejection"}


def test_settings_are_not_overwritten_by_default(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    file.write_text("mine")
    assert_refused(run("tune"), "foredraft.toml", "--overwrite")
    assert file.read_text() == "mine"


def test_settings_are_overwritten_with_overwrite(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    file.write_text("mine")
    small = ("--num-prompts", "1", "--max-tokens", "4", "--budget", "0.01s", "--method", "ngram", "--num-threads", "1")
    result = run("tune", "--overwrite", *small)
    assert result.exit_code == 0, result.stderr
    assert "method" in file.read_text()


def test_a_report_is_not_overwritten_by_default(tmp_path: Path) -> None:
    file = tmp_path / "report" / "results.json"
    file.parent.mkdir()
    file.write_text("mine")
    assert_refused(run("bench", "--output", "report"), "report/results.json already exists", "--overwrite")
    assert file.read_text() == "mine"


def test_a_report_is_overwritten_with_overwrite(tmp_path: Path) -> None:
    file = tmp_path / "report" / "results.json"
    file.parent.mkdir()
    file.write_text("mine")
    small = ("--num-prompts", "1", "--max-tokens", "4", "--budget", "0.01s", "--num-threads", "1")
    result = run("bench", "--output", "report", "--overwrite", "--config", "plain", *small)
    assert result.exit_code == 0, result.stderr
    assert json.loads(file.read_text())["schema"] == "foredraft.bench"


def test_bench_says_which_option_takes_a_settings_file(tmp_path: Path) -> None:
    assert_refused(run("bench", "--config", "gone.toml"), "--config gone.toml", "give the file as --settings gone.toml")
    (tmp_path / "tuned.settings").touch()
    assert_refused(run("bench", "--config", "tuned.settings"), "give the file as --settings tuned.settings")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="for Linux")
def test_a_full_disk_loses_the_trace_but_not_the_text() -> None:
    done = run("generate", "Once", "--max-tokens", "5", "--seed", "1", "--num-threads", "1", "--trace", "/dev/full")
    plain = run("generate", "Once", "--max-tokens", "5", "--seed", "1", "--num-threads", "1")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == plain.stdout
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "/dev/full" in warning
    assert "No space left" in warning


def test_a_benchmark_that_cannot_load_its_model_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nothing"}')
    monkeypatch.chdir(tmp_path)
    assert_refused(run("bench", "--model", tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
