"""foredraft chat."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from foredraft import LLM, SamplingParams
from tests.cli.conftest import TEMPLATE
from tests.command_line import COMMAND, QUICK, assert_refused, environment, in_a_terminal, run


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


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_input_that_is_not_utf8_is_refused(template: Path, locale: str) -> None:
    args = [str(arg) for arg in ("chat", "--chat-template", template, "--max-tokens", "2", *QUICK)]
    given = environment() | {"LC_ALL": locale}
    result = subprocess.run([*COMMAND, *args], input=b"caf\xe9\n", capture_output=True, env=given, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == b"error: standard input is not UTF-8 text"


def test_a_model_with_a_chat_template_needs_no_option(chat_model: Path) -> None:
    result = run("chat", "--model", chat_model, "--max-tokens", "8", "--temperature", "0", *QUICK, stdin="Hello\n")
    assert result.exit_code == 0, result.stderr
    llm = LLM(str(chat_model), num_threads=1)
    greeting = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(greeting, SamplingParams(max_tokens=8, temperature=0))
    assert result.stdout == f"{output.outputs[0].text}\n"


@pytest.mark.slow
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
