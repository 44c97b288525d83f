"""A checkpoint of an encoder-decoder with a tokenizer, on the command line and with the server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from foredraft import LLM
from foredraft.heads.decoder_draft import WEIGHTS, new_decoder, save_decoder
from tests.command_line import assert_refused, generate, json_lines, run
from tests.model.zoo import Species, random_model
from tests.server.conftest import running
from tests.text.toy_tokenizers import build

PROMPT = "hello hello"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    tokenizer = build("byte-level")
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 0}
    random_model(Species("t5", {**settings, **ids}, base={}).config()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text_of_generate(checkpoint: Path, prompt: str, num_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def test_generate_writes_what_transformers_writes(checkpoint: Path) -> None:
    expected = text_of_generate(checkpoint, PROMPT, 12)
    options = ("--model", checkpoint, "--temperature", "0", "--max-tokens", "12", PROMPT)
    for method in ("none", "suffix"):
        (line,) = json_lines(generate(*options, "--method", method, "--json"))
        assert line["text"] == expected
    result = generate(*options, "--draft-model", checkpoint)
    assert result.exit_code == 0
    assert expected in result.stdout


@pytest.mark.slow
def test_check_passes(checkpoint: Path) -> None:
    options = ("check", "--model", checkpoint, "--draft-model", checkpoint, "--max-tokens", "16", "--json")
    (found,) = json_lines(run(*options, "--temperature", "0"))
    assert found["verdict"] == "passed"
    assert all(control["rejected"] for control in found["controls"])


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_it_is_not_exported(checkpoint: Path, engine: str) -> None:
    result = run("export", "--to", engine, "--model", checkpoint, "--method", "ngram", "--speculative-tokens", "3")
    assert_refused(result, "is an encoder-decoder, which is not exported")


def test_inspect_describes_it(checkpoint: Path) -> None:
    result = run("inspect", "--model", checkpoint)
    assert result.exit_code == 0
    assert "T5ForConditionalGeneration" in result.stdout


def test_chat_is_refused(checkpoint: Path) -> None:
    assert_refused(run("chat", "--model", checkpoint), "no chat template")


def test_the_server_answers_completions(checkpoint: Path) -> None:
    expected = text_of_generate(checkpoint, PROMPT, 12)
    with running(LLM(checkpoint, method="suffix")) as server:
        body = {"model": "pair", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        answer = server.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == expected
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        assert answer["usage"]["prompt_tokens"] == len(tokenizer(PROMPT)["input_ids"])
        again = server.post("/v1/completions", {**body, "n": 2, "seed": 3, "temperature": 0.8, "stream": True})
        assert again.status_code == 200
        server.wait_until_idle()


def test_a_decoder_drafts_for_its_own_kind_of_target(checkpoint: Path, tmp_path: Path) -> None:
    decoder = tmp_path / "decoder"
    save_decoder(new_decoder(LLM(checkpoint, method="none").target, 1), decoder, "toy")
    result = run("inspect", "--model", checkpoint, "--draft-model", decoder, "--no-load")
    assert (result.exit_code, result.stderr) == (0, ""), "it needs no tokenizer of its own"
    result = run("inspect", "--draft-model", decoder, "--no-load")
    assert result.exit_code == 2
    assert "it is a decoder over the encoder of a t5, but the target is a llama" in result.stderr
    result = generate("--model", decoder, PROMPT)
    assert result.exit_code == 2
    assert "it is a decoder over another model's encoder" in result.stderr.splitlines()[-1]


def test_a_decoder_for_another_target_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    decoder = tmp_path / "decoder"
    save_decoder(new_decoder(LLM(checkpoint, method="none").target, 1), decoder, "toy")
    weights = load_file(decoder / WEIGHTS)
    weights.pop(next(iter(weights)))
    save_file(weights, decoder / WEIGHTS)
    result = generate("--model", checkpoint, "--draft-model", decoder, PROMPT)
    assert_refused(result, f"{decoder}: ", "the decoder belongs to another target")


def test_bench_measures_translation_and_summarisation_by_default(checkpoint: Path, tmp_path: Path) -> None:
    decoder = tmp_path / "decoder"
    save_decoder(new_decoder(LLM(checkpoint, method="none").target, 1), decoder, "toy")
    options = ("--num-prompts", "2", "--max-tokens", "8", "--output", tmp_path / "report", "--config", "draft_model:2")
    options += ("--budget", "2s")
    (found,) = json_lines(run("bench", "--model", checkpoint, "--draft-model", decoder, *options, "--json"))
    assert set(found["configurations"][0]["categories"]) == {"translation", "summarisation"}
    assert run("inspect", "--model", checkpoint, "--draft-model", decoder).exit_code == 0
