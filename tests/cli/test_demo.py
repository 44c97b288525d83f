"""foredraft demo."""

from __future__ import annotations

import re
from pathlib import Path

from foredraft import LLM, SamplingParams
from foredraft.tools.demo import DEMO_PROMPT, DEMO_QUESTION
from tests.command_line import QUICK, json_lines, run


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


def test_demo_prints_json() -> None:
    (found,) = json_lines(run("demo", "--max-tokens", "8", "--json", *QUICK))
    assert found["identical"] is True
    assert found["num_tokens"] == 8


def test_a_chat_model_answers_a_question(chat_model: Path) -> None:
    result = run("demo", "--model", chat_model, "--max-tokens", "12", *QUICK)
    assert result.exit_code == 0, result.stderr
    llm = LLM(str(chat_model), method="none", num_threads=1)
    question = [{"role": "user", "content": DEMO_QUESTION}]
    (output,) = llm.chat(question, SamplingParams(max_tokens=12, temperature=0))
    assert result.stdout.startswith(f"> {DEMO_QUESTION}\n\n{output.outputs[0].text}")
    assert re.search(r"texts identical +yes", result.stdout)
