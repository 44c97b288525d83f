"""foredraft generate: standard output, standard error and the exit code."""

from __future__ import annotations

import json
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, ForedraftError, SamplingParams, StructuredOutputs
from foredraft.engine.engine import Engine
from foredraft.model import EMBEDDED
from tests.command_line import PROMPT, QUICK, assert_refused, generate, in_a_terminal, json_lines, run
from tests.vocabulary.permuted import permuted_draft


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--json-schema", '{"enum": ["a", "bc"]}'], {"json": {"enum": ["a", "bc"]}}),
        (["--json-schema", "schema.json"], {"json": {"enum": ["a", "bc"]}}),
        (["--regex", "[ab]{5}"], {"regex": "[ab]{5}"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--grammar", "form.lark"], {"grammar": 'start: "a" | "bc"'}),
        (["--grammar", 'start: "a" | "bc"'], {"grammar": 'start: "a" | "bc"'}),
    ],
    ids=["text", "file", "regex", "choice", "grammar", "grammar as text"],
)
def test_a_format_can_be_given_on_the_command_line(
    options: list[str], form: dict[str, Any], llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"enum": ["a", "bc"]}')
    Path("form.lark").write_text('start: "a" | "bc"')
    (found,) = json_lines(generate(PROMPT, "--json", "--temperature", "0", *options))
    wanted = SamplingParams(max_tokens=128, temperature=0.0, structured_outputs=StructuredOutputs(**form))
    assert found["text"] == llm.generate(PROMPT, wanted)[0].outputs[0].text
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--regex", "(a"], ["structured_outputs.regex"]),
        (["--json-schema", '{"type": "strng"}'], ["structured_outputs.json", "strng"]),
        (["--json-schema", "nowhere.json"], ["nowhere.json", "cannot be read"]),
        (["--json-schema", "{"], ["--json-schema: structured_outputs.json", "not valid JSON"]),
        (["--grammar", "nowhere.lark"], ["nowhere.lark", "cannot be read"]),
        (["--grammar", 'root ::= "a"'], ["structured_outputs.grammar: it must be in Lark's form"]),
        (["--choice", "a", "--regex", "b"], ["--regex", "--choice", "one form"]),
        (["--choice", ""], ["structured_outputs.choice"]),
        (["--regex", "a", "--ignore-eos"], ["ignore_eos", "structured_outputs"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_an_unsupported_format_is_refused(options: list[str], words: list[str]) -> None:
    assert_refused(run("generate", PROMPT, *QUICK, *options), *words)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"type": ')
    assert_refused(run("generate", PROMPT, *QUICK, "--json-schema", file), f"--json-schema {file}: ", "not valid JSON")


def test_json_has_the_results_of_the_api(llm: LLM) -> None:
    fixed = ("--speculative-tokens", "4")  # "auto" may decide that drafting is not worth its time
    (found,) = json_lines(generate(PROMPT, "--json", "--max-tokens", "12", "--temperature", "0", *fixed))
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0.0))
    assert found["prompt"] == PROMPT
    assert found["text"] == output.outputs[0].text
    assert found["token_ids"] == output.outputs[0].token_ids
    assert found["finish_reason"] == "length"
    num_prompt = len(output.prompt_token_ids)
    assert found["usage"] == {
        "prompt_tokens": num_prompt, "completion_tokens": 12, "total_tokens": num_prompt + 12
    }  # fmt: skip
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert found["metrics"]["tokens_per_second"] > 0
    assert "choices" not in found


def test_several_texts_are_choices_of_one_object(llm: LLM) -> None:
    (found,) = json_lines(generate(PROMPT, "--json", "--max-tokens", "8", "--n", "3", "--seed", "7", "--ignore-eos"))
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, n=3, seed=7, ignore_eos=True))
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in found["choices"]] == [text.text for text in output.outputs]
    assert found["text"] == found["choices"][0]["text"]
    assert found["usage"]["completion_tokens"] == 24


def test_many_prompts_from_a_file_come_back_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": "def a(x):"}, {"prompt_token_ids": [0, 5, 6]}, {"prompt": "Once upon a time"}]
    objects, lines = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    objects.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    lines.write_text("def a(x):\nOnce upon a time\n")
    options = ("--json", "--max-tokens", "4", "--temperature", "0")
    found = json_lines(generate("--prompts", objects, *options))
    assert [one["prompt"] for one in found] == ["def a(x):", None, "Once upon a time"]
    assert found[1]["prompt_token_ids"] == [0, 5, 6]
    assert [one["token_ids"] for one in json_lines(generate("--prompts", lines, *options))] == [
        found[0]["token_ids"],
        found[2]["token_ids"],
    ]


@pytest.mark.parametrize("argument", [(), ("-",)], ids=["pipe", "dash"])
def test_the_prompt_can_be_read_from_standard_input(argument: tuple[str, ...]) -> None:
    options = ("--json", "--max-tokens", "4", "--temperature", "0")
    (found,) = json_lines(generate(*argument, *options, stdin=f"{PROMPT}\n"))
    assert found["prompt"] == PROMPT


def test_lines_of_prompts_may_end_as_on_windows(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"def f(x):\r\n\r\nOnce upon\r\n")
    found = json_lines(generate("--prompts", file, "--max-tokens", "1", "--json"))
    assert [one["prompt"] for one in found] == ["def f(x):", "Once upon"]


def test_a_pipe_gets_only_the_text(llm: LLM) -> None:
    result = generate(PROMPT, "--max-tokens", "16", "--temperature", "0")
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=0.0))
    assert result.exit_code == 0
    assert result.stdout == output.outputs[0].text + "\n"
    assert "16 tokens" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("sampling", [("--temperature", "0"), ("--temperature", "0.8", "--seed", "3")])
def test_drafts_do_not_change_the_text(sampling: tuple[str, ...]) -> None:
    texts = {
        generate(PROMPT, "--max-tokens", "16", *sampling, *method).stdout
        for method in (("--speculative-tokens", "0"), (), ("--method", "ngram"), ("--method", "suffix"))
    }
    assert len(texts) == 1


def test_stop_strings_end_the_text() -> None:
    options = ("--json", "--temperature", "0", "--max-tokens", "40")
    (whole,) = json_lines(generate(PROMPT, *options))
    word = whole["text"].split()[2]
    (found,) = json_lines(generate(PROMPT, *options, "--stop", "never there", "--stop", word))
    assert found["text"] == whole["text"][: whole["text"].index(word)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", word)


def test_several_texts_are_separated() -> None:
    result = generate(PROMPT, "--max-tokens", "4", "--n", "2")
    assert result.exit_code == 0
    assert len(re.findall(r"^==> .* <==$", result.stdout, re.MULTILINE)) == 2


def test_compare_shows_both_sides() -> None:
    options = ("--max-tokens", "8", "--temperature", "0", "--compare")
    result = generate(PROMPT, *options)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) <= 8  # only the text
    assert "plain" in result.stderr
    assert "speedup" in result.stderr
    (found,) = json_lines(generate(PROMPT, *options, "--json"))
    assert found["comparison"]["identical"] is True
    assert found["comparison"]["plain"]["tokens_per_second"] > 0


BAD_OPTIONS = {
    "unknown method": (("--method", "magic"), ("magic", "suffix")),
    "draft_model without one": (("--model", EMBEDDED / "target", "--method", "draft_model"), ("draft model",)),
    "missing model": (("--model", "/nowhere/at/all"), ("/nowhere/at/all",)),
    "missing draft": (("--draft-model", "/nowhere/at/all"), ("/nowhere/at/all",)),
    "temperature -1": (("--temperature", "-1"), ("temperature", "-1")),
    "temperature nan": (("--temperature", "nan"), ("temperature",)),
    "temperature warm": (("--temperature", "warm"), ("--temperature",)),
    "top-p 0": (("--top-p", "0"), ("top_p",)),
    "top-p 1.5": (("--top-p", "1.5"), ("top_p",)),
    "max-tokens 0": (("--max-tokens", "0"), ("--max-tokens", "greater than or equal to 1")),
    "max-tokens -3": (("--max-tokens", "-3"), ("--max-tokens", "greater than or equal to 1")),
    "n 0": (("--n", "0"), ("n must be",)),
    "speculative-tokens -1": (("--speculative-tokens", "-1"), ("speculative_tokens",)),
    "dtype": (("--dtype", "int3"), ("int3", "bfloat16")),
    "threads": (("--num-threads", "0"), ("num_threads",)),
    "compare nothing": (("--speculative-tokens", "0", "--compare", "--json", "--max-tokens", "1"), ("compare",)),
    "prompts file": (("--prompts", "/nowhere.txt"), ()),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_a_bad_option_is_refused_in_one_line(options: tuple[str | Path, ...], words: tuple[str, ...]) -> None:
    assert_refused(run("generate", PROMPT, *QUICK, *options), *words)


BAD_PROMPTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "empty"),
    "too long": ("word " * 3000, "2048"),
    "not text": (b"def f(\xff\xfe", "UTF-8"),
}


@pytest.mark.parametrize(("prompt", "word"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_refused_in_one_line(prompt: str | bytes, word: str) -> None:
    assert_refused(generate("--json", stdin=prompt), word)


@pytest.mark.parametrize("line", ["{", "[1, 2]", '{"text": "a"}', '{"prompt": 3}', '{"prompt_token_ids": [9999]}'])
def test_a_bad_prompts_file_is_refused_in_one_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}) + "\n" + line + "\n")
    assert_refused(generate("--prompts", file, "--json"))


def test_a_corrupt_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    copy = shutil.copytree(EMBEDDED / "target", tmp_path / "corrupt")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_refused(generate(PROMPT, "--model", copy), str(copy))


def test_a_draft_with_another_vocabulary_is_refused_in_one_line() -> None:
    refused = generate(PROMPT, "--draft-model", permuted_draft(), "--heterogeneous-vocab", "none")
    assert_refused(refused, "the draft model's vocabulary differs from the target's")
    assert_refused(
        generate(PROMPT, "--heterogeneous-vocab", "other"), "heterogeneous_vocab must be one of auto, slem, tli"
    )


@pytest.mark.slow
def test_a_terminal_shows_origins_in_colour() -> None:
    fixed = ("--speculative-tokens", "4")  # "auto" may decide that drafting is not worth its time
    args = ("generate", PROMPT, "--max-tokens", "24", "--temperature", "0", *fixed, *QUICK)
    with in_a_terminal(*args) as (process, _, read):
        shown = read(lambda text: b"tokens/s" in text)
        read(lambda text: False)
        assert process.wait(timeout=60) == 0
    assert b"\x1b[32m" in shown
    assert b"accepted draft token" in shown


def test_thresholds_are_applied_and_crossings_are_reported() -> None:
    result = generate(PROMPT, "--max-draft-memory", "1", "--speculative-tokens", "4", "--max-tokens", "8", "--json")
    assert len(json_lines(result)) == 1
    (line,) = [line for line in result.stderr.splitlines() if "max_draft_memory" in line]
    assert line.startswith("warning: draft_model")


@pytest.mark.parametrize("option", [("--max-draft-memory", "much"), ("--min-acceptance-rate", "2")], ids=str)
def test_impossible_thresholds_are_refused(option: tuple[str, str]) -> None:
    assert_refused(generate(PROMPT, *option), option[1])


def test_a_text_that_fails_midway_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original, num_passes = Engine._score, count()

    def fail_later(self: Engine, *args: Any) -> Any:
        if next(num_passes) > 2:
            raise ForedraftError("the device is gone")
        return original(self, *args)

    monkeypatch.setattr(Engine, "_score", fail_later)
    found = generate(PROMPT, "--method", "none", "--temperature", "0")
    assert found.exit_code == 2
    assert found.stderr.splitlines()[-1].startswith("error: ")
    assert "the device is gone" in found.stderr.splitlines()[-1]
    assert found.stdout


def test_without_a_model_the_embedded_targets_head_drafts() -> None:
    asked = ("--max-tokens", "12", "--temperature", "0", "--json")
    (found,), (plain,) = (json_lines(generate(PROMPT, "--method", name, *asked)) for name in ("eagle", "none"))
    assert found["text"] == plain["text"]
