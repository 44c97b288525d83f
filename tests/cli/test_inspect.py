"""foredraft inspect."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from foredraft.model import EMBEDDED
from tests.command_line import QUICK, assert_refused, json_lines, run
from tests.heads.random_heads import embedded_head, save_eagle3
from tests.vocabulary.permuted import permuted_draft


def test_inspect_reports_that_the_embedded_pair_fits() -> None:
    (found,) = json_lines(run("inspect", "--json", *QUICK))
    assert found["fits"] is True
    assert found["target"]["measured"]["cache_bytes_per_token"] == 8192
    shown = run("inspect", "--no-load", *QUICK)
    assert shown.exit_code == 0
    assert "fits: yes" in shown.stdout


def test_inspect_exits_with_2_if_two_models_do_not_fit() -> None:
    result = run("inspect", "--draft-model", permuted_draft(), "--heterogeneous-vocab", "none", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["fits"] is False
    (line,) = result.stderr.splitlines()
    assert "the draft model's vocabulary differs from the target's: token 0 is" in line


def test_inspect_says_how_a_draft_with_another_vocabulary_is_used(tmp_path: Path) -> None:
    options = ("--draft-model", permuted_draft(), "--no-load", *QUICK)
    shown = run("inspect", *options)
    assert shown.exit_code == 0, shown.stderr
    assert re.search(
        r"vocabularies: different; tli: .*on the built-in text 100 % of the draft's ids agree in place, "
        r"and it has ([0-9.]+) bytes per id against \1\n",
        shown.stdout,
    )
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    (found,) = json_lines(run("inspect", "--json", "--coverage", text, "--heterogeneous-vocab", "slem", *options))
    assert found["fits"] is True
    assert found["vocabularies"]["method"] == "slem"
    assert found["vocabularies"]["text"] == "given"


def test_coverage_needs_a_text(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert_refused(run("inspect", "--no-load", "--coverage", empty, *QUICK), "empty.txt contains no text")


def test_inspect_of_a_missing_model_is_refused_in_one_line() -> None:
    assert_refused(run("inspect", "--model", "/nowhere/at/all"), "/nowhere/at/all")


@pytest.mark.slow
def test_inspect_measures_quality_on_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text()[:4000])
    options = ("--model", EMBEDDED / "draft", "--quality", text, "--quality-tokens", "300", *QUICK)
    (found,) = json_lines(run("inspect", "--json", "--dtype", "float32", *options))
    assert found["quality"]["num_tokens"] == 300
    assert found["quality"]["perplexity_increase"] == 0
    assert found["quality"]["agreement"] == 100
    shown = run("inspect", "--quantization", "int8", *options)
    assert shown.exit_code == 0, shown.stderr
    assert re.search(r"quality: bfloat16 with int8 weights against float32, over 300 tokens", shown.stdout)
    assert re.search(r"perplexity: [0-9.]+ against [0-9.]+ \([+-][0-9.]+ %\)", shown.stdout)
    assert re.search(r"agreement: the same likeliest token at [0-9.]+ % of positions", shown.stdout)


def test_inspect_describes_a_head(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def area(width, height):\n    return width * height\n" * 20)
    options = ("--draft-model", embedded_head("eagle"), "--coverage", text, "--no-load", *QUICK)
    (found,) = json_lines(run("inspect", "--json", *options))
    assert found["draft"] is None
    assert found["head"]["kind"] == "eagle3"
    assert found["head"]["taps"] == [2, 4, 5]
    assert 0 < found["head"]["coverage"] < 1
    shown = run("inspect", *options)
    assert shown.exit_code == 0, shown.stderr
    assert re.search(r"1,024 of 4,096 ids: [0-9.]+% of the text's tokens", shown.stdout)
    assert re.search(r"[0-9.]+ MiB in int8, [0-9.]+% of a pass of the target", shown.stdout)


def test_mistakes_about_heads_are_reported_in_one_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Hello.")
    target = ("--model", EMBEDDED / "target")
    assert_refused(run("inspect", *target, "--no-load", "--coverage", text, *QUICK), "--coverage", "give --draft-model")
    other = save_eagle3(AutoConfig.from_pretrained(EMBEDDED / "draft", hidden_size=128), tmp_path / "other")
    assert_refused(run("inspect", "--no-load", "--draft-model", other, *QUICK), "belongs to another target")


def test_inspect_without_quality_does_not_mention_it() -> None:
    (found,) = json_lines(run("inspect", "--no-load", "--json", *QUICK))
    assert found["quality"] is None
    assert "perplexity" not in run("inspect", "--no-load", *QUICK).stdout


def test_an_unusable_text_for_quality_is_refused_in_one_line(tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("Hello.")
    binary.write_bytes(b"\xff" * 100)
    draft = ("--model", EMBEDDED / "draft", *QUICK)
    assert_refused(run("inspect", *draft, "--quality", short), "too short")
    assert_refused(run("inspect", *draft, "--quality", binary), "binary.txt is not UTF-8 text")
    assert_refused(run("inspect", *draft, "--quality", tmp_path / "none.txt"), "none.txt", "cannot be read")
    assert_refused(run("inspect", *draft, "--quality", short, "--no-load"), "--no-load")
    assert_refused(run("inspect", *draft, "--quantization", "int3"), "int3")


def test_inspect_predicts_what_int8_saves() -> None:
    (plain,) = json_lines(run("inspect", "--no-load", "--json", *QUICK))
    (narrow,) = json_lines(run("inspect", "--no-load", "--json", "--quantization", "int8", *QUICK))
    assert narrow["memory"]["weight_bytes"] < plain["memory"]["weight_bytes"]
    shown = run("inspect", "--no-load", "--quantization", "int8", *QUICK)
    assert "linear layers in int8" in shown.stdout
    assert re.search(r"peak: [0-9.]+ [MG]iB, with one text of the full context", shown.stdout)
