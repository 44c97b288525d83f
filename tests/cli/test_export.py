"""`foredraft export`: the configuration on standard output, everything about it on standard error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from foredraft.export import ENGINES
from foredraft.settings import Settings
from tests.command_line import assert_refused, run
from tests.export.exporting import TARGET, options_of


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """A settings file as tune writes it."""
    file = tmp_path / "foredraft.toml"
    settings = Settings(model=TARGET, method="ngram", speculative_tokens=3)
    settings.write(file, {"advice": "Use ngram with 3 draft tokens.", "processor": "A processor", "date": "today"})
    return file


def test_tuned_settings_are_exported(tuned: Path) -> None:
    result = run("export", "--to", "vllm", "--config", tuned)
    assert result.exit_code == 0, result.stderr
    assert options_of(result.stdout)["speculative_config"]["num_speculative_tokens"] == 3
    first, second, *differences = result.stderr.splitlines()
    assert first == "Measured with foredraft (A processor, today): Use ngram with 3 draft tokens."
    assert second == "Differences with vLLM 0.32:"
    assert all(line.startswith("- ") for line in differences)


def test_options_override_the_file(tuned: Path) -> None:
    result = run("export", "--to", "tensorrt-llm", "--config", tuned, "--method", "suffix", "--speculative-tokens", 5)
    config = yaml.safe_load(result.stdout)["speculative_config"]
    assert (config["decoding_type"], config["max_draft_len"]) == ("SA", 5)


@pytest.mark.parametrize("most", [-2, 0])
def test_a_number_that_no_engine_takes_is_refused(tmp_path: Path, most: int) -> None:
    file = tmp_path / "foredraft.toml"
    Settings(model=TARGET, method="suffix", max_speculative_tokens=most).write(file)
    assert_refused(run("export", "--to", "vllm", "--config", file), "max_speculative_tokens", "at least 1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "nothing"], ["unknown engine 'nothing'", *ENGINES]),
        (["--to", "vllm", "--method", "self-int8"], ["cannot use self-int8", "nearest"]),
        (["--to", "sglang", "--method", "suffix"], ["cannot use suffix", "--method ngram"]),
        (["--to", "transformers"], ["fixed number of tokens", "--speculative-tokens"]),
        (["--to", "llamacpp", "--method", "ngram"], ["GGUF"]),
        (["--to", "vllm", "--method", "sufix"], ["unknown method 'sufix'"]),
        (["--to", "vllm", "--model", "/nowhere"], ["no such directory"]),
        (["--to", "vllm", "--config", "/nowhere.toml"], ["cannot be read"]),
    ],
)
def test_unsupported_exports_are_refused_in_one_line(arguments: list[str], words: list[str]) -> None:
    assert_refused(run("export", *arguments), *words)
