"""The command line: what reaches standard output, what standard error, and the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import foredraft
from foredraft import LLM, SamplingParams, StructuredOutputs
from foredraft.cli import app
from foredraft.cli.options import num_bytes
from foredraft.cli.render import OriginPieces, pieces_of
from foredraft.model import EMBEDDED
from foredraft.tools.demo import DEMO_PROMPT

PROMPT = "def read_lines(path):"
BABYLLAMA = Path(__file__).parents[2] / "shared" / "models" / "babyllama105"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUICK = ("--num-threads", "1")


def run(*args: str | Path, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)


def generate(*args: str | Path, stdin: str | bytes | None = None) -> Any:
    return run("generate", *args, *QUICK, stdin=stdin)


def json_lines(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_refused(result: Any, *words: str) -> None:
    """One line that says why, exit code 2, and nothing where the output belongs."""
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    return file


# generate


@pytest.mark.parametrize(
    ("options", "form"),
    [
        (["--json-schema", '{"enum": ["a", "bc"]}'], {"json": {"enum": ["a", "bc"]}}),
        (["--json-schema", "schema.json"], {"json": {"enum": ["a", "bc"]}}),
        (["--regex", "[ab]{5}"], {"regex": "[ab]{5}"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--grammar", "form.lark"], {"grammar": 'start: "a" | "bc"'}),
    ],
    ids=["text", "file", "regex", "choice", "grammar"],
)
def test_a_form_from_the_command_line(
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
        (["--json-schema", "{"], ["structured_outputs.json", "no JSON"]),
        (["--grammar", "nowhere.lark"], ["nowhere.lark", "cannot be read"]),
        (["--choice", "a", "--regex", "b"], ["--regex", "--choice", "one form"]),
        (["--choice", ""], ["structured_outputs.choice"]),
        (["--regex", "a", "--ignore-eos"], ["ignore_eos", "structured_outputs"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_form_that_cannot_be_honoured_is_refused(options: list[str], words: list[str]) -> None:
    assert_refused(run("generate", PROMPT, *QUICK, *options), *words)


def test_json_is_what_the_api_says(llm: LLM) -> None:
    fixed = ("--speculative-tokens", "4")  # "auto" may find that drafts do not pay
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
def test_the_prompt_can_come_from_standard_input(argument: tuple[str, ...]) -> None:
    options = ("--json", "--max-tokens", "4", "--temperature", "0")
    (found,) = json_lines(generate(*argument, *options, stdin=f"{PROMPT}\n"))
    assert found["prompt"] == PROMPT


def test_a_pipe_gets_the_bare_text(llm: LLM) -> None:
    result = generate(PROMPT, "--max-tokens", "16", "--temperature", "0")
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=16, temperature=0.0))
    assert result.exit_code == 0
    assert result.stdout == output.outputs[0].text + "\n"
    assert "16 tokens" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("sampling", [("--temperature", "0"), ("--temperature", "0.8", "--seed", "3")])
def test_drafts_are_invisible_in_the_text(sampling: tuple[str, ...]) -> None:
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


def test_several_texts_are_told_apart() -> None:
    result = generate(PROMPT, "--max-tokens", "4", "--n", "2")
    assert result.exit_code == 0
    assert len(re.findall(r"^==> .* <==$", result.stdout, re.MULTILINE)) == 2


def test_compare_shows_both_sides() -> None:
    options = ("--max-tokens", "8", "--temperature", "0", "--compare")
    result = generate(PROMPT, *options)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) <= 8  # the text alone
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
def test_a_bad_option_is_one_line(options: tuple[str | Path, ...], words: tuple[str, ...]) -> None:
    assert_refused(run("generate", PROMPT, *QUICK, *options), *words)


BAD_PROMPTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "empty"),
    "too long": ("word " * 3000, "2048"),
    "not text": (b"def f(\xff\xfe", "UTF-8"),
}


@pytest.mark.parametrize(("prompt", "word"), BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_one_line(prompt: str | bytes, word: str) -> None:
    assert_refused(generate("--json", stdin=prompt), word)


@pytest.mark.parametrize("line", ["{", "[1, 2]", '{"text": "a"}', '{"prompt": 3}', '{"prompt_token_ids": [9999]}'])
def test_a_bad_prompts_file_is_one_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT}) + "\n" + line + "\n")
    assert_refused(generate("--prompts", file, "--json"))


def test_a_corrupt_checkpoint_is_one_line(tmp_path: Path) -> None:
    copy = shutil.copytree(EMBEDDED / "target", tmp_path / "corrupt")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_refused(generate(PROMPT, "--model", copy), str(copy))


def test_a_draft_of_another_vocabulary_is_one_line() -> None:
    if not BABYLLAMA.is_dir():
        pytest.skip("needs ../shared/models/babyllama105, a draft of another vocabulary")
    assert_refused(generate(PROMPT, "--draft-model", BABYLLAMA), "105 tokens against 4096")


def test_the_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"foredraft {foredraft.__version__}\n")


@pytest.mark.parametrize("command", [(), ("generate",), ("chat",), ("demo",), ("inspect",)])
def test_help(command: tuple[str, ...]) -> None:
    assert run(*command, "--help").exit_code == 0


# demo, inspect


def test_demo_streams_its_text_and_then_a_table() -> None:
    result = run("demo", "--max-tokens", "12", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(DEMO_PROMPT)
    assert "accepted draft token" in result.stdout
    assert re.search(r"texts identical +yes", result.stdout)
    for row in (
        "tokens/s +[0-9.]+ +[0-9.]+",
        "inter-token latency",
        "draft acceptance rate",
        "α",
        "τ",
        "speedup +[0-9]",
    ):
        assert re.search(row, result.stdout)
    assert result.stderr == ""


def test_demo_as_json() -> None:
    (found,) = json_lines(run("demo", "--max-tokens", "8", "--json", *QUICK))
    assert found["identical"] is True
    assert found["num_tokens"] == 8


def test_inspect_says_that_the_embedded_pair_fits() -> None:
    (found,) = json_lines(run("inspect", "--json", *QUICK))
    assert found["fits"] is True
    assert found["target"]["measured"]["cache_bytes_per_token"] == 8192
    shown = run("inspect", "--no-load", *QUICK)
    assert shown.exit_code == 0
    assert "fits: yes" in shown.stdout


def test_inspect_ends_with_2_where_two_models_do_not_fit() -> None:
    if not BABYLLAMA.is_dir():
        pytest.skip("needs ../shared/models/babyllama105, a draft of another vocabulary")
    result = run("inspect", "--draft-model", BABYLLAMA, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["fits"] is False
    (line,) = result.stderr.splitlines()
    assert "105 tokens against 4096" in line


def test_inspect_of_nothing_is_one_line() -> None:
    assert_refused(run("inspect", "--model", "/nowhere/at/all"), "/nowhere/at/all")


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


def test_inspect_without_quality_says_nothing_of_it() -> None:
    (found,) = json_lines(run("inspect", "--no-load", "--json", *QUICK))
    assert found["quality"] is None
    assert "perplexity" not in run("inspect", "--no-load", *QUICK).stdout


def test_quality_on_no_text_is_one_line(tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("Hello.")
    binary.write_bytes(b"\xff" * 100)
    draft = ("--model", EMBEDDED / "draft", *QUICK)
    assert_refused(run("inspect", *draft, "--quality", short), "too short")
    assert_refused(run("inspect", *draft, "--quality", binary), "binary.txt is no UTF-8 text")
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


# chat


def test_chat_needs_a_template() -> None:
    assert_refused(run("chat", *QUICK, stdin="Hello\n"), "--chat-template")


def test_chat_remembers_earlier_turns(llm: LLM, template: Path) -> None:
    options = ("--chat-template", template, "--max-tokens", "8", "--temperature", "0", *QUICK)
    result = run("chat", *options, stdin="Once upon a time\n\nThe end\n/exit\nnever read\n")
    assert result.exit_code == 0, result.stderr
    params = SamplingParams(max_tokens=8, temperature=0.0)
    messages, said = [], ""
    for question in ("Once upon a time", "The end"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, params, chat_template=TEMPLATE)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        said += f"{answer}\n"
    assert result.stdout == said


# origins


def test_pieces_are_the_text_and_follow_the_tokens(llm: LLM) -> None:
    prompt, params = "x = 'ﬀ é 漢字 🙂'\ny = ", SamplingParams(max_tokens=40, seed=2, temperature=1.4)
    output = llm.generate(prompt, params)[0]
    text = output.outputs[0]
    assert llm.tokenizer is not None
    pieces = pieces_of(text, llm.tokenizer, output.prompt_token_ids)
    assert "".join(piece for piece, _ in pieces) == text.text
    assert {origin for _, origin in pieces} == set(text.origins)


def test_streamed_pieces_are_the_text_even_where_a_stop_string_holds_it_back(llm: LLM) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.0))[0].outputs[0].text
    params = SamplingParams(max_tokens=40, temperature=0.0, stop=(whole[30:36],))
    assert llm.tokenizer is not None
    pieces = OriginPieces(llm.tokenizer, llm.tokenizer(PROMPT)["input_ids"])
    shown = ""
    for delta in llm.stream(PROMPT, params):
        shown += "".join(piece for piece, _ in pieces.split(delta.text, delta.token_ids, delta.origins))
    assert shown == whole[: whole.index(whole[30:36])]


# a process of its own

COMMAND = (sys.executable, "-m", "foredraft.cli")
ENDLESS = ("generate", PROMPT, "--max-tokens", "1900", "--ignore-eos", *QUICK)


def environment() -> dict[str, str]:
    source = str(Path(foredraft.__file__).parents[1])
    path = os.pathsep.join(part for part in (source, os.environ.get("PYTHONPATH")) if part)
    return {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")} | {
        "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""
    }  # fmt: skip


def heed_interrupts() -> None:
    # a background job of a shell is born deaf to them
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def started(*args: str | Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*COMMAND, *map(str, args)], env=environment(), preexec_fn=heed_interrupts, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def piped(*args: str | Path) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return started(*args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_json_is_alone_on_standard_output() -> None:
    with piped("generate", PROMPT, "--json", "--max-tokens", "4", *QUICK) as process:
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0
    assert len(json.loads(stdout)["token_ids"]) == 4
    assert stderr == b""  # no loading bars, no warnings of the libraries


def test_a_mistake_leaves_no_traceback() -> None:
    with piped("generate", PROMPT, "--model", "/nowhere/at/all") as process:
        stdout, stderr = process.communicate(timeout=300)
    assert (process.returncode, stdout) == (2, b"")
    assert stderr.startswith(b"error: /nowhere/at/all")
    assert stderr.count(b"\n") == 1


def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    with piped(*ENDLESS) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=300) == 141
        assert process.stderr.read() == b""


def test_an_interrupt_ends_it_with_130() -> None:
    with piped(*ENDLESS) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert b"Traceback" not in stderr


@contextlib.contextmanager
def in_a_terminal(*args: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[bytes], None], Any]]:
    """The process, a function that types, and one that reads until what was shown satisfies it."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read_until(enough: Callable[[bytes], bool], seconds: float = 300) -> bytes:
        end = time.monotonic() + seconds
        while not enough(bytes(shown)):
            assert time.monotonic() < end, bytes(shown)
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    shown.extend(os.read(ours, 4096))
                except OSError:  # the other side is closed
                    break
        return bytes(shown)

    def type_in(text: bytes) -> None:
        shown.clear()
        os.write(ours, text)

    with started(*args, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        try:
            yield process, type_in, read_until
        finally:
            os.close(ours)


def test_a_terminal_shows_origins_in_colour() -> None:
    with in_a_terminal("generate", PROMPT, "--max-tokens", "24", "--temperature", "0", *QUICK) as (process, _, read):
        shown = read(lambda text: b"tokens/s" in text)
        read(lambda text: False)
        assert process.wait(timeout=60) == 0
    assert b"\x1b[32m" in shown
    assert b"accepted draft token" in shown


def test_an_interrupt_ends_an_answer_and_not_the_chat(template: Path) -> None:
    args = ("chat", "--chat-template", template, "--ignore-eos", *QUICK)
    with in_a_terminal(*args) as (process, type_in, read):
        read(lambda text: text.endswith(b"> "))
        type_in(b"Once upon a time\n")
        read(lambda text: len(text) > 60)
        process.send_signal(signal.SIGINT)
        shown = read(lambda text: text.endswith(b"> "))
        assert b"Traceback" not in shown
        type_in(b"/exit\n")
        read(lambda text: False)
        assert process.wait(timeout=60) == 0


# check


def test_check_says_that_it_passed(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def fibonacci(n):\nOnce upon a time\nclass Queue:\nThe dog saw a cat. The cat\n")
    options = ("check", "--prompts", prompts, "--temperature", "0", "--max-tokens", "24")
    (found,) = json_lines(run(*options, "--json"))
    assert found["verdict"] == "passed"
    assert {one["name"] for one in found["checks"]} == {"identity", "teacher-forced"}
    assert found["controls"]
    assert all(control["rejected"] for control in found["controls"])
    result = run(*options)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "verdict: passed"


def test_check_says_in_its_exit_code_that_it_did_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("size", "expected"), [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1000000", 1_000_000), ("1.5 KiB", 1536)]
)
def test_an_amount_of_memory_may_have_a_unit(size: str, expected: int) -> None:
    assert num_bytes(size) == expected


def test_thresholds_reach_the_engine_and_are_said() -> None:
    result = generate(PROMPT, "--max-draft-memory", "1", "--speculative-tokens", "4", "--max-tokens", "8", "--json")
    assert len(json_lines(result)) == 1
    (line,) = [line for line in result.stderr.splitlines() if "max_draft_memory" in line]
    assert line.startswith("warning: draft_model")


@pytest.mark.parametrize("option", [("--max-draft-memory", "much"), ("--min-acceptance-rate", "2")], ids=str)
def test_a_threshold_that_could_not_be_meant_is_refused(option: tuple[str, str]) -> None:
    assert_refused(generate(PROMPT, *option), option[1])
