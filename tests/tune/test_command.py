"""foredraft tune, and the settings that it writes. Nothing here is timed: a budget of 0 runs one round."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.model import EMBEDDED
from foredraft.settings import Settings

QUICK = ("--num-threads", "1")


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def tune(*args: str | Path) -> Any:
    return run("tune", *QUICK, "--num-prompts", "2", "--max-tokens", "6", "--budget", "20s", *args)


def assert_refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The result of tuning the embedded pair, given by name, with two candidates."""
    file = tmp_path_factory.mktemp("tune") / "own.toml"
    pair = ("--model", EMBEDDED / "target", "--draft-model", EMBEDDED / "draft")
    return tune(*pair, "--method", "draft_model+suffix", "--output", file, "--json"), file


@pytest.mark.slow
def test_json_has_advice_measurements_and_predictions(tuned: tuple[Any, Path]) -> None:
    result, _ = tuned
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["schema"] == "foredraft.tune"
    assert {(one["method"], one["speculative_tokens"]) for one in found["predicted"]} == {
        (method, gamma) for method in ("draft_model", "suffix") for gamma in range(1, 9)
    }
    assert any(one["method"] == "draft_model+suffix" for one in found["measured"])
    assert found["settings"]["sampling"]["max_tokens"] == 6


def test_the_file_has_the_advised_settings(tuned: tuple[Any, Path]) -> None:
    result, file = tuned
    assert json.loads(result.stdout)["settings"]["budget"] == 20.0  # as given, loading included
    advice = json.loads(result.stdout)["advice"]
    found = Settings.read(file)
    assert (found.method, found.speculative_tokens) == (advice["method"], advice["speculative_tokens"])
    assert (found.model, found.draft_model) == (str(EMBEDDED / "target"), str(EMBEDDED / "draft"))
    assert found.num_threads == 1
    assert tomllib.loads(file.read_text())["measured"]["advice"] == advice["text"]


def test_generate_reads_the_file_and_options_override_it(tuned: tuple[Any, Path], tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    Settings(model=str(EMBEDDED / "target"), method="suffix", speculative_tokens=3, num_threads=1).write(file)
    text = "one two three one two three one two"

    def steps(*args: str | Path) -> dict[str, Any]:
        result = run("generate", text, "--temperature", "0", "--max-tokens", "16", "--json", "--config", *args)
        assert result.exit_code == 0, result.stderr
        metrics: dict[str, Any] = json.loads(result.stdout)["metrics"]
        return metrics["speculative_decoding"]

    assert steps(file)["num_draft_tokens"] > 0
    assert steps(file, "--method", "none")["num_draft_tokens"] == 0
    is_plain = Settings.read(tuned[1]).method == "none"
    assert (steps(tuned[1])["num_draft_tokens"] == 0) == is_plain


@pytest.mark.slow
def test_tune_uses_the_models_of_a_file_but_not_its_drafter(tuned: tuple[Any, Path], tmp_path: Path) -> None:
    result = tune("--config", tuned[1], "--output", tmp_path / "again.toml", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {"draft_model", "ngram"} < {one["method"] for one in found["predicted"]}
    assert found["advice"]["text"].startswith("Use" if found["advice"]["speculate"] else "Do not speculate")
    assert Settings.read(tmp_path / "again.toml").draft_model == str(EMBEDDED / "draft")


def test_bench_measures_the_settings_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    Settings(method="suffix", speculative_tokens=3, num_threads=1).write(file)
    result = run(
        *("bench", "--settings", file, "--num-prompts", "1", "--max-tokens", "4", "--budget", "0.01s", "--json"),
        *("--output", tmp_path / "report"),
    )
    assert result.exit_code == 0, result.stderr
    assert [one["name"] for one in json.loads(result.stdout)["configurations"]] == ["plain", "suffix:3"]


def test_bench_finds_the_packaged_head(tmp_path: Path) -> None:
    options = (
        "--num-prompts",
        "1",
        "--max-tokens",
        "4",
        "--budget",
        "0.01s",
        "--json",
        "--output",
        tmp_path / "report",
        "--overwrite",
    )
    for configurations in (("plain", "eagle:2"), ("suffix:2", "suffix+eagle:2")):
        result = run("bench", *QUICK, *(part for one in configurations for part in ("--config", one)), *options)
        assert result.exit_code == 0, result.stderr
        assert [one["name"] for one in json.loads(result.stdout)["configurations"]] == [*configurations]


@pytest.mark.slow
def test_tune_finds_the_packaged_head(tmp_path: Path) -> None:
    result = tune("--method", "suffix+eagle", "--output", tmp_path / "own.toml", "--json")
    assert result.exit_code == 0, result.stderr
    assert {"suffix", "eagle"} <= {one["method"] for one in json.loads(result.stdout)["predicted"]}


def test_help_is_printed() -> None:
    assert run("tune", "--help").exit_code == 0


def test_mistakes_are_reported_in_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("gamma = 3")
    assert_refused(run("generate", "a", "--config", bad), "gamma", "bad.toml")
    assert_refused(run("demo", "--config", tmp_path / "nowhere.toml"), "nowhere.toml")
    assert_refused(tune("--output", tmp_path / "no" / "where.toml"), "where.toml")
    dated = tmp_path / "dated.toml"
    dated.write_text('method = "eagle"\n[head_settings]\nx = 2020-01-01')
    assert_refused(tune("--output", tmp_path / "a.toml", "--config", dated), "head_settings")
    assert_refused(tune("--output", tmp_path / "a.toml", "--method", "magic"), "magic")
    assert_refused(tune("--output", tmp_path / "a.toml", "--batch-size", "0"), "batch sizes")
