"""Training of a decoder over the target's own encoder: the loss, and a run of the command on a toy target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import T5ForConditionalGeneration
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import ForedraftError
from foredraft.heads.decoder_draft import save_decoder
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train.decoder_head import DecoderKind
from foredraft.train.losses import DistillationLoss
from foredraft.train.pairs import PairIds, pair_blocks
from foredraft.train.peak_memory import pass_memory

QUICK = ("--context", "16", "--batch-size", "4", "--num-threads", "1")
PAIRS = [PairIds([5, 6, 7, 0], [9, 8, 0]), PairIds([4, 0], [7, 6, 5, 4, 0])]


def head(toy_t5: Path, pairs: Path, out: Path, *args: str | Path) -> Any:
    given = ("head", "--kind", "decoder", "--target", toy_t5, "--pairs", pairs, "--out", out, *QUICK, *args)
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in given)])


@pytest.fixture(scope="module")
def target(toy_t5: Path) -> LanguageModel:
    return load_model(toy_t5, LoadOptions(dtype="float32", device="cpu"))


def test_the_loss_compares_the_decoder_with_the_target_at_the_same_position(target: LanguageModel) -> None:
    kind, hf = DecoderKind(1), target.hf
    decoder = kind.new(target, [], seed=0)
    blocks = pair_blocks(PAIRS, 8)
    objective = kind.objectives(decoder, target)(DistillationLoss("kl", 0.7))
    sums = objective(decoder, blocks.ids.long(), blocks.next_ids.long(), 0.0)
    expected = 0.0
    for source, text in PAIRS:
        given: Any = {"decoder_input_ids": torch.tensor([[0, *text[:-1]]])}
        with torch.no_grad():
            outputs = hf(input_ids=torch.tensor([source]), **given)  # type: ignore[operator]
            encoded = (outputs.encoder_last_hidden_state,)
            logits = decoder(encoder_outputs=encoded, **given).logits  # type: ignore[operator]
        log_q, log_p = (functional.log_softmax(each[0] / 0.7, dim=-1) for each in (logits, outputs.logits))
        expected += float(functional.kl_div(log_q, log_p, log_target=True, reduction="sum"))
    assert float(sums.loss.detach()) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert sums.num_rows == 8
    sums.loss.backward()  # type: ignore[no-untyped-call]
    trained = {name for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    assert trained
    assert trained == {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert not any("embed" in name or "encoder." in name.removeprefix("decoder.") for name in trained)


def test_a_decoder_with_all_of_the_targets_layers_has_no_loss(target: LanguageModel) -> None:
    kind = DecoderKind(3)
    decoder = kind.new(target, [], seed=0)
    blocks = pair_blocks(PAIRS, 8)
    objective = kind.objectives(decoder, target)(DistillationLoss("kl", 1.0))
    sums = objective(decoder, blocks.ids.long(), blocks.next_ids.long(), 0.0)
    assert sums.acceptance == pytest.approx(8, abs=1e-3)
    assert pass_memory(decoder, objective, (2, 16)).gradients == 2 * 8 * 4096 * 4


def test_a_saved_decoder_is_loaded_unchanged(target: LanguageModel, tmp_path: Path) -> None:
    kind = DecoderKind(2)
    decoder = kind.new(target, [], seed=0)
    save_decoder(decoder, tmp_path, "toy", torch.float32)
    again = kind.load(str(tmp_path), target).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in decoder.state_dict().items())
    with pytest.raises(ForedraftError, match="its number of layers is 2, but --layers is 1"):
        DecoderKind(1).load(str(tmp_path), target)


def test_a_decoder_is_trained_resumed_and_drafts(toy_t5: Path, pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "decoder"
    asked = ("--layers", "1", "--temperature", "0", "--temperature", "1", "--generations", "8", "--only-generations")
    result = head(toy_t5, pairs, out, *asked, "--steps", "20", "--validation-share", "0.2", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["history"][-1]["loss"]["held-out text"] < found["history"][0]["loss"]["held-out text"]
    assert "A decoder of 1 layer over the encoder" in (out / "README.md").read_text()
    again = head(toy_t5, pairs, out, *asked, "--steps", "20", "--validation-share", "0.2", "--json")
    assert json.loads(again.stdout)["history"] == found["history"]
    llm = LLM(toy_t5, out, dtype="float32", speculative_tokens=2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (one.generate("the cat sat", params) for one in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0


def test_a_decoder_for_a_bfloat16_target_is_trained_and_drafts(toy_t5: Path, pairs: Path, tmp_path: Path) -> None:
    """Compiled kernels are used if there are any."""
    target, out = tmp_path / "target", tmp_path / "decoder"
    shutil.copytree(toy_t5, target)
    T5ForConditionalGeneration.from_pretrained(toy_t5, dtype=torch.bfloat16).save_pretrained(target)
    result = head(target, pairs, out, "--layers", "3", "--steps", "1", "--validation-share", "0.2", "--json")
    assert result.exit_code == 0, result.stderr
    assert (
        json.loads(result.stdout)["history"][0]["acceptance"]["held-out text"] > 0.95
    )  # it is initialised with the target's layers
    llm = LLM(target, out, speculative_tokens=2)
    for params in (SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(seed=3, max_tokens=8)):
        one, other = (each.generate(["the cat sat"] * 3, params) for each in (llm, llm.with_drafter("none")))
        assert [each.outputs[0].token_ids for each in one] == [each.outputs[0].token_ids for each in other]


def test_a_context_beyond_the_targets_is_fine_if_pairs_are_short(toy_t5: Path, pairs: Path, tmp_path: Path) -> None:
    result = head(toy_t5, pairs, tmp_path / "decoder", "--steps", "1", "--context", "100000")
    assert result.exit_code == 0, result.stderr


def test_it_is_only_for_encoder_decoders(toy: Path, toy_t5: Path, text: Path, tmp_path: Path) -> None:
    for target, message in (
        (toy, "is a decoder-only model, but heads of this kind are for encoder-decoders"),
        (toy_t5, "give --pairs"),
    ):
        out = tmp_path / target.name
        given = ("head", "--kind", "decoder", "--target", target, "--data", text, "--out", out, "--steps", "1")
        result = CliRunner().invoke(app, ["train", *(str(arg) for arg in (*given, *QUICK))])
        assert result.exit_code == 2
        assert message in result.stderr.splitlines()[-1]
