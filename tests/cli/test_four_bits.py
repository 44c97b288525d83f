"""Every command with a target in four bits: quantised while it is loaded, and from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from foredraft import LLM, SamplingParams
from foredraft.kernels import load_kernels, why_none
from foredraft.model import EMBEDDED
from foredraft.server import ServerSettings
from tests.cli.conftest import TEMPLATE
from tests.cli.gguf_model import write_embedded_target
from tests.command_line import QUICK, json_lines, run
from tests.server.conftest import running

PROMPT = "def read_lines(path):"
NUM_PARAMETERS = 7_500_000
GREEDY = ("--max-tokens", "12", "--temperature", "0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(load_kernels() is None, reason=f"no kernels: {why_none()}"),
]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedded_target(tmp_path_factory.mktemp("gguf") / "target.gguf", "Q4_0")


@pytest.fixture(scope="module", params=["int4", "gguf"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, gguf_file: Path) -> tuple[str, ...]:
    """The options for a target, with the embedded draft."""
    pair = ("--model", str(gguf_file if kind == "gguf" else EMBEDDED / "target"))
    draft = ("--draft-model", str(EMBEDDED / "draft"))
    return (*pair, *draft, *QUICK, *(("--quantization", "int4") if kind == "int4" else ()))


@pytest.fixture(scope="module")
def llm(kind: str, gguf_file: Path) -> Iterator[LLM]:
    if kind == "gguf":
        yield LLM(str(gguf_file), method="none", num_threads=1)
    else:
        yield LLM(str(EMBEDDED / "target"), method="none", quantization="int4", num_threads=1)


def text_of(llm: LLM, prompt: str = PROMPT, **more: Any) -> str:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0, **more))
    return output.outputs[0].text


def test_generate_writes_the_text_of_plain_decoding(model: tuple[str, ...], llm: LLM) -> None:
    (found,) = json_lines(run("generate", PROMPT, *GREEDY, *model, "--json"))
    assert found["text"] == text_of(llm)


def test_chat_answers_as_plain_decoding_does(model: tuple[str, ...], llm: LLM, template: Path) -> None:
    result = run("chat", *GREEDY, *model, "--chat-template", template, stdin="Hello\n")
    assert result.exit_code == 0, result.stderr
    greeting = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(greeting, SamplingParams(max_tokens=12, temperature=0), chat_template=TEMPLATE)
    assert result.stdout == f"{output.outputs[0].text}\n"


def test_the_chat_template_of_a_gguf_file_is_used(gguf_file: Path) -> None:
    result = run("chat", "--model", gguf_file, *GREEDY, *QUICK, stdin="Hello\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


def test_demo_finds_the_texts_identical(model: tuple[str, ...]) -> None:
    (found,) = json_lines(run("demo", "--max-tokens", "12", *model, "--json"))
    assert found["identical"] is True


def test_check_passes(model: tuple[str, ...], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def fibonacci(n):\nOnce upon a time\nclass Queue:\nThe dog saw a cat. The cat\n")
    options = ("--prompts", prompts, "--temperature", "0", "--max-tokens", "24")
    (found,) = json_lines(run("check", *options, *model, "--json"))
    assert found["verdict"] == "passed", found


def test_inspect_measures_the_weights_in_four_bits(model: tuple[str, ...], kind: str) -> None:
    (found,) = json_lines(run("inspect", *model, "--json"))
    assert found["fits"] is True
    target = found["target"]
    assert target["quantization"] == ("int4" if kind == "int4" else None), "None: nothing is rounded while loading"
    # when quantised the embedding stays in bfloat16, and the lm_head is in eight bits
    bits = 8 if kind == "int4" else 5
    assert target["measured"]["weight_bytes"] < NUM_PARAMETERS * bits / 8


def test_inspect_measures_the_quality_loss_of_four_bits(model: tuple[str, ...], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(__file__).read_text())
    (found,) = json_lines(run("inspect", *model, "--quality", text, "--quality-tokens", "300", "--json"))
    assert found["quality"]["num_tokens"] >= 299, "without a BOS nothing predicts the first"
    assert 70 < found["quality"]["agreement"] <= 100


def test_tune_writes_settings_that_load_the_model(model: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    options = ("--num-prompts", "2", "--max-tokens", "6", "--budget", "20s", "--method", "draft_model")
    (found,) = json_lines(run("tune", *options, *model, "--output", file, "--json"))
    assert found["schema"] == "foredraft.tune"
    result = run("generate", PROMPT, *GREEDY, "--json", "--config", file, *QUICK)
    assert result.exit_code == 0, result.stderr


def test_bench_writes_a_report(model: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--num-prompts", "2", "--max-tokens", "6", "--budget", "2s", "--output", tmp_path / "out")
    result = run("bench", *options, "--config", "plain", "--config", "draft_model:2", *model)
    assert result.exit_code == 0, result.stderr
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert runs


def test_a_trace_is_recorded_and_shown(model: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    result = run("generate", PROMPT, *GREEDY, *model, "--trace", file)
    assert result.exit_code == 0, result.stderr
    shown = run("trace", "view", file)
    assert shown.exit_code == 0, shown.stderr
    assert Path(shown.stdout.strip()).stat().st_size > 10_000


def test_the_server_answers_as_plain_decoding_does(kind: str, gguf_file: Path, llm: LLM) -> None:
    source = gguf_file if kind == "gguf" else EMBEDDED / "target"
    quantization = None if kind == "gguf" else "int4"
    served = LLM(str(source), str(EMBEDDED / "draft"), quantization=quantization, num_threads=1)
    with running(served) as server:
        body = {"model": "any", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        model = httpx2.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
        answer = server.post("/v1/completions", body | {"model": model})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == text_of(llm)


@pytest.fixture(scope="module")
def plain_smollm2(smollm2: Path) -> LLM:
    return LLM(str(smollm2), method="none", num_threads=1)


def answer_of(llm: LLM, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=24, temperature=0))
    return output.outputs[0].text


@pytest.mark.real_model
def test_smollm2_chats_as_plain_decoding_does(smollm2: Path, plain_smollm2: LLM) -> None:
    options = ("--model", smollm2, "--max-tokens", "24", "--temperature", "0", *QUICK)
    result = run("chat", *options, stdin="Name three colours.\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{answer_of(plain_smollm2, 'Name three colours.')}\n"


@pytest.mark.real_model
def test_the_demo_works_with_smollm2(smollm2: Path) -> None:
    (found,) = json_lines(run("demo", "--model", smollm2, "--max-tokens", "32", *QUICK, "--json"))
    assert found["identical"] is True
    assert found["num_tokens"] == 32


@pytest.mark.real_model
def test_smollm2_continues_a_text_and_answers_over_http(smollm2: Path, plain_smollm2: LLM) -> None:
    prompt = "The capital of France is"
    (found,) = json_lines(run("generate", prompt, *GREEDY, "--model", smollm2, *QUICK, "--json"))
    assert "Paris" in found["text"]
    with running(LLM(str(smollm2), num_threads=1), ServerSettings(model_names=("smollm2",))) as server:
        model = httpx2.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"]
        messages = [{"role": "user", "content": "Name three colours."}]
        body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        content = answer.json()["choices"][0]["message"]["content"]
        assert content == answer_of(plain_smollm2, "Name three colours.")
