"""A checkpoint of Whisper with a tokenizer: its output is decoded, and commands that only take text refuse it in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foredraft import LLM, SamplingParams
from tests.command_line import assert_refused, run
from tests.model.zoo import WHISPER, Species, random_model, sound
from tests.server.conftest import running
from tests.text.toy_tokenizers import build

REFUSAL = "reads audio, not text"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    tokenizer = build("byte-level")
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 0}
    random_model(Species("whisper", {**WHISPER.settings, **ids}, base=WHISPER.base).config()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_text_is_decoded_by_the_tokenizer(checkpoint: Path) -> None:
    llm = LLM(checkpoint, checkpoint, speculative_tokens=3)
    prompts = [{"input_features": sound((16, 80), seed)} for seed in range(3)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for output in outputs:
        (text,) = output.outputs
        assert text.text == tokenizer.decode(text.token_ids, skip_special_tokens=True) != ""
    assert (llm.engine.stats.conditional_acceptance or 0) >= 0.9


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "hello"),
        ("check", "--max-tokens", "4"),
        ("bench", "--config", "suffix:2"),
        ("tune",),
        ("serve", "--port", "0"),
    ],
)
def test_commands_that_take_text_refuse_it(checkpoint: Path, command: tuple[str, ...]) -> None:
    assert_refused(run(*command, "--model", checkpoint), REFUSAL)


def test_it_is_no_target_of_training(checkpoint: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a sound\tits words\n" * 4)
    out = ("--out", tmp_path / "draft", "--steps", "1", "--context", "8", "--init", checkpoint)
    assert_refused(run("train", "distill", "--target", checkpoint, "--pairs", pairs, *out), REFUSAL)


def test_inspect_describes_it(checkpoint: Path) -> None:
    result = run("inspect", "--model", checkpoint)
    assert result.exit_code == 0
    assert "WhisperForConditionalGeneration" in result.stdout


def test_the_server_refuses_completions(checkpoint: Path) -> None:
    with running(LLM(checkpoint, method="suffix")) as server:
        answer = server.post("/v1/completions", {"model": "pair", "prompt": "hello", "max_tokens": 4})
        assert answer.status_code == 400
        assert REFUSAL in answer.json()["error"]["message"]
        assert "\n" not in answer.json()["error"]["message"]
        server.wait_until_idle()
