"""--trace, and foredraft trace view."""

from __future__ import annotations

import json
from pathlib import Path

from foredraft.trace import read_trace
from tests.command_line import PROMPT, assert_refused, generate, json_lines, run

SHORT = ("--max-tokens", "12", "--temperature", "0")


def test_generate_records_what_it_writes(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    (found,) = json_lines(generate(PROMPT, "--json", *SHORT, "--trace", file))
    (text,) = read_trace(file).texts
    assert text.token_ids == found["token_ids"]
    stats = found["metrics"]["stats"]
    assert text.stats.num_accepted_tokens == stats["num_accepted_tokens"]
    assert text.stats.acceptance_histogram == stats["acceptance_histogram"]


def test_a_comparison_is_not_recorded(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    result = generate(PROMPT, *SHORT, "--compare", "--trace", file)
    assert result.exit_code == 0
    assert len(read_trace(file).texts) == 1


def test_demo_records_the_text_it_shows(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    result = run("demo", "--max-tokens", "8", "--num-threads", "1", "--trace", file)
    assert result.exit_code == 0
    (text,) = read_trace(file).texts
    assert len(text.token_ids) == 8


def test_chat_records_every_answer(tmp_path: Path) -> None:
    file, template = tmp_path / "run.jsonl", tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    args = ("--chat-template", template, "--max-tokens", "6", "--num-threads", "1", "--trace", file)
    assert run("chat", *args, stdin="one\ntwo\n").exit_code == 0
    assert len(read_trace(file).texts) == 2


def test_view_writes_a_page_beside_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    generate(PROMPT, *SHORT, "--trace", file)
    result = run("trace", "view", file)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'run.html'}\n")
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    other = tmp_path / "other.html"
    assert run("trace", "view", file, "--output", other).stdout == f"{other}\n"
    assert other.read_bytes() == (tmp_path / "run.html").read_bytes()


def test_a_page_does_not_replace_its_trace(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    generate(PROMPT, *SHORT, "--trace", file)
    assert_refused(run("trace", "view", file), "would replace the trace")
    assert read_trace(file).is_complete


def test_an_impossible_recording_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert_refused(generate(PROMPT, *SHORT, "--trace", tmp_path / "nowhere" / "run.jsonl"), "cannot be written")
    assert_refused(run("demo", "--json", "--trace", tmp_path / "run.jsonl"), "--trace", "--json")


def test_files_that_cannot_be_viewed_are_refused(tmp_path: Path) -> None:
    assert_refused(run("trace", "view", tmp_path / "nothing.jsonl"), "cannot be read")
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"prompt": "x"}) + "\n")
    assert_refused(run("trace", "view", file), "not a trace")
    assert_refused(run("trace", "view", file, "--output", file), "not a trace")
