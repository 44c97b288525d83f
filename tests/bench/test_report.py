"""The report: all its files, which have the same numbers."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft import LLM, ForedraftError, SamplingParams
from foredraft.bench import Configuration, Workload, run_bench
from foredraft.bench.report import as_dict, facts, markdown, write_report
from foredraft.cli import app
from foredraft.engine.stats import SpeculationStats

QUESTIONS = (
    {"question_id": 81, "category": "writing", "turns": ["Once upon a time", "Then the dog"]},
    {"question_id": 82, "category": "writing", "turns": ["A little girl"]},
    {"question_id": 121, "category": "coding", "turns": ["def mean(values):", "def median(values):"]},
    {"category": "coding", "prompt": "import os"},
)
NAMES = ["plain", "draft_model:3", "suffix:4@2"]
PLOTS = {f"{name}.{kind}" for name in ("speedup", "latency", "acceptance") for kind in ("svg", "png")}
FILES = {"report.md", "results.json", "runs.jsonl", *PLOTS}
DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "benchmarking.md"


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", *map(str, args), "--num-threads", "1"])


def files_of(directory: Path) -> set[str]:
    return {file.name for file in directory.iterdir()}


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("workload") / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return file


@pytest.fixture(scope="module")
def outcome(workload: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The result of the command on the embedded pair, and its report."""
    directory = tmp_path_factory.mktemp("report") / "new" / "one"
    configs = [argument for name in NAMES for argument in ("--config", name)]
    result = run(
        *configs, "--workload", workload, "--max-tokens", "10", "--repeats", "2", "--output", directory, "--json"
    )
    assert result.exit_code == 0, result.stderr
    return result, directory


@pytest.fixture
def results(outcome: tuple[Any, Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((outcome[1] / "results.json").read_text())
    return found


@pytest.fixture
def runs(outcome: tuple[Any, Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome[1] / "runs.jsonl").read_text().splitlines()]


def turns(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (turn for run in runs for answer in run["answers"] for turn in answer["turns"])


def test_every_file_exists_and_has_the_right_format(outcome: tuple[Any, Path]) -> None:
    directory = outcome[1]
    assert files_of(directory) == FILES
    for name in PLOTS:
        raw = (directory / name).read_bytes()
        if name.endswith(".png"):
            assert raw.startswith(b"\x89PNG")
        else:
            assert ElementTree.fromstring(raw).tag.endswith("svg")


def test_standard_output_only_has_the_json(outcome: tuple[Any, Path], results: dict[str, Any]) -> None:
    result, directory = outcome
    assert json.loads(result.stdout) == results
    assert str(directory) in result.stderr


def test_the_report_says_what_was_measured(results: dict[str, Any]) -> None:
    assert (results["schema"], results["version"]) == ("foredraft.bench", 1)
    assert [one["name"] for one in results["configurations"]] == NAMES
    assert results["settings"]["sampling"] | {"temperature": 0.0, "max_tokens": 10} == results["settings"]["sampling"]
    assert results["settings"]["num_questions"] == results["settings"]["num_questions_measured"] == 4
    assert results["environment"]["machine"]["num_threads"] == 1
    assert all(list(one["categories"]) == ["writing", "coding"] for one in results["configurations"])


def test_counts_are_the_sums_of_the_runs(results: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    for one in results["configurations"]:
        for category, found in [(None, one["overall"]), *one["categories"].items()]:
            own = [r for r in runs if r["configuration"] == one["name"] and category in (None, r["category"])]
            total = sum((SpeculationStats(**turn["stats"]) for turn in turns(own)), SpeculationStats())
            assert found["stats"] == {name: getattr(total, name) for name in total.__slots__}
            assert found["num_tokens"] == sum(len(turn["token_ids"]) for turn in turns(own))
            assert found["seconds"] == pytest.approx(sum(r["seconds"] for r in own))
            assert found["tokens_per_second"] == pytest.approx(found["num_tokens"] / found["seconds"])
            assert found["inter_token_latency"]["num"] == sum(len(turn["gaps"]) for turn in turns(own))


def test_totals_are_the_sums_of_the_categories(results: dict[str, Any]) -> None:
    for one in results["configurations"]:
        parts = one["categories"].values()
        for name in ("num_questions", "num_answers", "num_tokens", "num_repeated_8gram_tokens", "seconds"):
            assert one["overall"][name] == pytest.approx(sum(part[name] for part in parts))


def test_texts_are_those_of_the_baseline(results: dict[str, Any]) -> None:
    assert results["settings"]["texts_must_agree"] is True
    assert results["settings"]["turns"] == "steps"
    for one in results["configurations"]:
        assert one["overall"]["identity"] == {
            "num_answers": 8,
            "num_identical": 8,
            "first_difference": None,
            "share": 1.0,
        }
    plain = results["configurations"][0]["overall"]
    assert plain["speedup"]["value"] == plain["median_speedup"]["value"] == plain["spec_bench"]["speedup"] == 1.0
    assert plain["spec_bench"]["mean_accepted_tokens"] == 1.0


def test_the_page_documents_every_field(results: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    def fields(found: Any) -> Iterator[str]:
        for name, value in found.items():
            yield name
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, dict):
                    yield from fields(part)

    text = DOCUMENT.read_text()
    named = set(fields(results)) | set(fields(runs[0]))
    categories = {"writing", "coding"}
    assert not [name for name in sorted(named - categories) if f"`{name}`" not in text]


def test_markdown_names_the_machine_the_models_and_the_settings(outcome: tuple[Any, Path]) -> None:
    text = (outcome[1] / "report.md").read_text()
    for word in ("embedded/target (bfloat16", "embedded/draft", "1 threads", "torch ", "temperature 0.0", "at most 10 tokens",
                 "questions.jsonl: 4 of 4 questions", "120 tokens under plain", "in repeated 8-grams", "## writing", "## coding", "(speedup.svg)",
                 "Spec-Bench speedup", *NAMES):  # fmt: skip
        assert word in text


def test_the_table_goes_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("--num-prompts", "1", "--max-tokens", "4", "--repeats", "1")
    assert result.exit_code == 0, result.stderr
    assert "plain" in result.stdout
    assert "draft_model:" in result.stdout
    (directory,) = tmp_path.iterdir()
    assert directory.name in result.stderr
    assert files_of(directory) == FILES


def test_a_single_configuration_is_not_compared(tmp_path: Path) -> None:
    """Plots of an earlier benchmark in the same directory are removed."""
    for name in ("results.json", "speedup.svg"):
        (tmp_path / name).write_text("of another benchmark")
    options = ("--num-prompts", "1", "--max-tokens", "4", "--repeats", "1", "--output", tmp_path, "--overwrite")
    result = run("--config", "plain", *options)
    assert result.exit_code == 0, result.stderr
    assert files_of(tmp_path) == {"report.md", "results.json", "runs.jsonl", "latency.svg", "latency.png"}


def test_lines_of_a_text_file_are_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("def a():\n\nOnce upon\n")
    result = run("--workload", file, "--max-tokens", "2", "--repeats", "1", "--output", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["settings"]["num_questions"] == 2


def test_a_differing_text_is_reported() -> None:
    llm = LLM(num_threads=1)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    found = run_bench(llm, [Configuration.plain(), Configuration("suffix", 2)], Workload.of(["def f():"]), params)
    turn = found.runs_of("suffix:2")[0].answers[0].turns[0]
    object.__setattr__(turn, "token_ids", (*turn.token_ids[:3], 7, *turn.token_ids[4:]))
    (line,) = [line for line in facts(found) if "differs" in line]
    assert "suffix:2 differs from plain in 1 of 1 answers, first in question 1, turn 1, token 3 (7 instead of" in line
    assert line in markdown(found)
    unseeded = run_bench(llm, None, Workload.of(["def f():"]), SamplingParams(max_tokens=4, temperature=0.9))
    assert any("texts need not agree" in line for line in facts(unseeded))
    assert as_dict(unseeded)["configurations"][1]["overall"]["identity"] is None


def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run_bench(LLM(num_threads=1), None, Workload.of(["a"]), SamplingParams(max_tokens=2, temperature=0.0))
    with pytest.raises(ForedraftError, match="cannot be used as the report's directory"):
        write_report(found, tmp_path / "file")
    (tmp_path / "report.md").mkdir()
    with pytest.raises(ForedraftError, match=r"report\.md: cannot be written"):
        write_report(found, tmp_path)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--config", "oracle:4"], "oracle"),
        (["--config", "plain", "--config", "plain"], "given 2 times"),
        (["--budget", "soon"], "duration"),
        (["--budget", "-3"], "duration"),
        (["--num-prompts", "0"], "at least 1"),
        (["--batch-size", "0"], "batch_size"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-tokens", "5000"], "lower max_tokens"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_a_mistake_is_reported_in_one_line(args: list[str], word: str, tmp_path: Path) -> None:
    result = run(*args, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if "Loading weights" not in line]
    assert line.startswith("error: ")
    assert word in line
