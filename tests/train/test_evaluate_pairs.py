"""Evaluation of drafts for encoder-decoders on pairs: it agrees with transformers, and predicts the engine's τ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration
from typer.testing import CliRunner

from foredraft import LLM
from foredraft.cli import app
from foredraft.engine.sources import TokenSource
from foredraft.heads.decoder_draft import new_decoder, save_decoder
from foredraft.model import EMBEDDED, LoadOptions, load_model
from foredraft.train.corpus import Pair
from foredraft.train.decoder_head import DecoderKind
from foredraft.train.held_out import held_out_text
from foredraft.train.text_acceptance import acceptance_on, draft_of
from tests.train.conftest import make_toy_t5

SOURCE, TEXT = (17, 300, 41, 9, 0), [0, 25, 1200, 7, 7, 300, 0]


@pytest.fixture(scope="module")
def decoder(toy_t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with two of the target's three layers, over its encoder."""
    folder = tmp_path_factory.mktemp("decoder")
    target = load_model(toy_t5, LoadOptions(dtype="float32", device="cpu"))
    save_decoder(DecoderKind(2).new(target, [], seed=0), folder, str(toy_t5), torch.float32)
    return folder


@pytest.fixture(scope="module")
def small_t5(toy_t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise, and so with its own encoder."""
    folder = make_toy_t5(tmp_path_factory.mktemp("small_t5"))
    hf = T5ForConditionalGeneration.from_pretrained(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    hf.save_pretrained(folder)
    return folder


def loaded(target: Path, draft: Path) -> LLM:
    return LLM(target, draft, dtype="float32", speculative_tokens=3, num_threads=1)


def evaluate(target: Path, draft: Path, *args: str | Path) -> Any:
    given = ("evaluate", "--target", target, "--draft", draft, "--dtype", "float32", "--num-threads", "1", *args)
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in given)])


def hf_logits(folder: Path, source: tuple[int, ...], ids: list[int]) -> torch.Tensor:
    hf = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out = hf(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids[:-1]]))
    logits: torch.Tensor = out.logits[0]
    return logits


def test_acceptance_is_that_of_the_distributions_of_transformers(toy_t5: Path, small_t5: Path) -> None:
    llm = loaded(toy_t5, small_t5)
    of_tokens, of_draws = acceptance_on(llm.target, draft_of(llm), TEXT, 0.7, source=TokenSource(SOURCE))
    p, q = (torch.softmax(hf_logits(each, SOURCE, TEXT).double() / 0.7, -1) for each in (toy_t5, small_t5))
    index = torch.tensor(TEXT[1:])[:, None]
    torch.testing.assert_close(
        of_tokens[0], (q.gather(1, index) / p.gather(1, index)).clamp(max=1)[:, 0], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(of_draws[0], torch.minimum(p, q).sum(-1), rtol=1e-3, atol=1e-4)
    assert float(of_draws.min()) < 0.99


def test_a_decoder_with_all_of_the_targets_layers_is_always_right(toy_t5: Path, tmp_path: Path) -> None:
    target = load_model(toy_t5, LoadOptions(dtype="float32", device="cpu"))
    save_decoder(DecoderKind(3).new(target, [], seed=0), tmp_path / "same", str(toy_t5), torch.float32)
    torch.manual_seed(0)
    save_decoder(new_decoder(target, 1), tmp_path / "other", str(toy_t5), torch.float32)
    found = []
    for name in ("same", "other"):
        llm = loaded(toy_t5, tmp_path / name)
        _, of_draws = acceptance_on(llm.target, draft_of(llm), TEXT, 0.7, source=TokenSource(SOURCE))
        found.append(float(of_draws.min()))
    assert found[0] == pytest.approx(1, abs=1e-3)
    assert found[1] < 0.99


@pytest.mark.parametrize("draft", ["decoder", "small_t5"])
def test_the_steps_of_greedy_texts_are_predicted(
    draft: str, toy_t5: Path, pairs: Path, request: pytest.FixtureRequest
) -> None:
    """Nothing is drawn, so predictions are exact except for near ties."""
    result = evaluate(
        *(toy_t5, request.getfixturevalue(draft), "--pairs", f"backwards={pairs}", "--temperature", "0", "--check"),
        *("--num-texts", "8", "--speculative-tokens", "3", "--max-tokens", "24", "--budget", "none", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    (kind,) = json.loads(result.stdout)["kinds"]
    (found,) = kind["of"]
    assert (kind["kind"], kind["num_texts"], kind["num_documents"]) == ("backwards", 8, 59)
    assert found["tau"] > 1.05
    assert found["tau"] == pytest.approx(found["measured_tau"], rel=0.01)
    assert 0 < kind["acceptance_on_text"] < 1


def test_jsonl_is_read_as_in_training_and_the_speed_is_predicted(toy_t5: Path, decoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    records = [{"source": "the cat sat", "answer": "sat cat the"}, {"source": "a dog", "answer": "dog a dog a"}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = evaluate(
        *(toy_t5, decoder, "--pairs", f"backwards={file}", "--text-field", "answer", "--temperature", "0.8"),
        *("--max-tokens", "8", "--speculative-tokens", "2", "--budget", "0.01s"),
    )
    assert result.exit_code == 0, result.stderr
    assert "backwards: 2 of 24 texts were measured: there are 2 documents" in result.stdout
    assert "predicted speedup" in " ".join(result.stdout.split())


def test_a_pair_is_cut_to_the_context_of_the_models(toy_t5: Path, small_t5: Path) -> None:
    llm = loaded(toy_t5, small_t5)
    most = llm.target.traits.source_len
    text = held_out_text(llm, Pair("the cat " * most, "a dog"), prompt_len=24)
    assert text is not None
    assert len(text.source) == most
    assert list(text.source.ids) == text.prompt
    assert (text.ids[0], text.ids[-1], text.num_given) == (0, 0, 1)


def test_documents_of_the_other_kind_are_refused(toy_t5: Path, small_t5: Path, pairs: Path) -> None:
    embedded = (EMBEDDED / "target", EMBEDDED / "draft")
    for models, options, words in (
        ((toy_t5, small_t5), ("--data", f"x={pairs}"), "is an encoder-decoder: give --pairs (sources and texts)"),
        (embedded, ("--pairs", f"x={pairs}"), "is a decoder-only model: give --data (texts)"),
        (
            embedded,
            ("--pairs", f"x={pairs}", "--data", f"x={pairs}"),
            "give --data NAME=FILE: held-out text, or --pairs",
        ),
        (embedded, ("--pairs", f"{pairs}"), "--pairs takes NAME=FILE"),
    ):
        result = evaluate(*models, *options, "--budget", "none")
        assert result.exit_code == 2
        assert words in result.stderr.splitlines()[-1]
