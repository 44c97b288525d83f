"""Training of draft models to write several tokens in one pass: the loss, and runs of the command."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import ForedraftError
from foredraft.model import EMBEDDED, LoadOptions, load_tokenizer
from foredraft.model.mask_token import mask_token_of
from foredraft.testing.requests import request_for
from foredraft.train import Data, LearningRates, Recipe, Start, train_distill, train_lm
from foredraft.train.blocks import IGNORED, draft_generator
from foredraft.train.evaluate import measured_tau
from foredraft.train.expected import Expectation, expect
from foredraft.train.losses import DistillationLoss, TargetDistribution, distillation_loss
from foredraft.train.parallel_drafts import (
    ParallelDistillation,
    check_window,
    draft_rows,
    kept_shares,
    with_mask_token,
)
from foredraft.train.records import read_log
from foredraft.train.run_folder import save_model
from foredraft.train.students import load_for_training
from foredraft.train.text_acceptance import ParallelDraftModel, acceptance_on, draft_of
from tests.heads.random_heads import embedded_pard
from tests.train.interrupted import stopping_after

QUICK = ("--context", "16", "--batch-size", "2", "--num-threads", "1", "--validation-share", "0.2")
MASK = 77
_MODULES = ("argparse", "ast", "calendar", "csv", "difflib", "heapq", "inspect", "pickle", "random", "shutil")


def train(toy: Path, text: Path, out: Path, *args: str | Path) -> Any:
    given = ("distill", "--target", toy, "--data", text, "--out", out, *QUICK, *args)
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in given)])


@pytest.fixture(scope="module")
def models(toy: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and another model as student."""
    target, student = load_for_training(str(toy)), load_for_training(str(toy))
    generator = torch.Generator().manual_seed(1)
    for weight in student.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return target.eval(), student


def test_fewer_drafts_continue_at_each_position() -> None:
    assert kept_shares(1) == [1.0]
    assert kept_shares(7) == pytest.approx([1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2])
    ids = torch.randint(1, 4096, (3, 20), generator=torch.Generator().manual_seed(0))
    rows = draft_rows(ids, 4, draft_generator(ids, 0.0))
    for text in range(3):
        by_place = [set(rows.anchors[text][rows.places[text] == place].tolist()) for place in range(4)]
        assert [len(anchors) for anchors in by_place] == [20, 14, 10, 7]
        assert by_place[3] < by_place[2] < by_place[1] < by_place[0]
    assert torch.equal(rows.positions, rows.anchors + rows.places)
    for texts, progress, is_same in ((ids, 0.0, True), (ids + 1, 0.0, False), (ids, 0.01, False)):
        assert torch.equal(draft_rows(ids, 4, draft_generator(texts, progress)).anchors, rows.anchors) == is_same


def test_the_loss_compares_every_position_with_the_target(
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """Draft by draft: the student reads the text up to the anchor and masks after it, the target reads the text itself."""
    target, student = models
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4096, (2, 9), generator=generator)
    next_ids = torch.cat([ids[:, 1:], torch.tensor([[7], [IGNORED]])], dim=1)
    next_ids[1, 2] = IGNORED
    sums = ParallelDistillation(target, 4, MASK, DistillationLoss("kl", 0.7))(student, ids, next_ids, 0.0)
    rows, total, acceptance, count = draft_rows(ids, 4, draft_generator(ids, 0.0)), 0.0, 0.0, 0
    with torch.no_grad():
        target_logits = target(ids).logits
        for text, anchor, place in zip(*(torch.arange(2)[:, None].expand_as(rows.places), *rows[::2]), strict=True):
            for b, a, j in zip(text.tolist(), anchor.tolist(), place.tolist(), strict=True):
                if a + j < 9 and next_ids[b, a + j] != IGNORED:
                    read = torch.tensor([[*ids[b, : a + 1].tolist(), *[MASK] * j]])
                    own = distillation_loss(
                        student(read).logits[0, -1:], TargetDistribution.of(target_logits[b, a + j][None], 0.7), 1.0
                    )
                    total, acceptance, count = total + float(own.loss), acceptance + own.acceptance, count + 1
    assert sums.num_rows == 16
    assert count > 2 * 16
    assert float(sums.loss.detach()) / 16 == pytest.approx(total / count, rel=1e-4)
    assert sums.acceptance / 16 == pytest.approx(acceptance / count, rel=1e-4)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None for weight in student.parameters())


def test_a_mask_token_is_added_after_those_of_the_tokenizer(toy: Path) -> None:
    """Texts are tokenized as before."""
    student, ids = load_for_training(str(toy)), torch.tensor([[5, 6, 7, 4095]])
    with torch.no_grad():
        before = student(ids).logits
        with_mask_token(student, 4096)
        assert torch.equal(student(ids).logits[..., :4096], before)
    weight = student.get_input_embeddings().weight
    assert weight.shape[0] == 4112
    assert mask_token_of(student.config.to_dict()) == 4096
    torch.testing.assert_close(weight[4096], weight[:4096].mean(0))
    assert with_mask_token(student, 9) is student
    assert mask_token_of(student.config.to_dict()) == 4096


def test_a_window_that_ends_within_a_block_is_refused(toy: Path) -> None:
    student = load_for_training(str(toy))
    check_window(student, 512)
    student.config.sliding_window = 128
    check_window(student, 128)
    with pytest.raises(
        ForedraftError, match="--context 129 is longer than the draft's attention window: give at most 128"
    ):
        check_window(student, 129)


def test_a_draft_is_trained_and_writes_in_one_pass(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    result = train(toy, text, out, "--steps", "40", "--layers", "1", "--parallel-tokens", "4", "--json")
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (kind,) = first["loss"]
    assert last["loss"][kind] < 0.9 * first["loss"][kind]
    assert "each of the 4 positions that it drafts in one pass" in (out / "README.md").read_text()
    saved = AutoModelForCausalLM.from_pretrained(out)
    assert (saved.config.pard_token, saved.config.spd_type) == (4096, "pard")
    llm = LLM(toy, out, dtype="float32", speculative_tokens=3)
    assert llm.method == "pard"
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (each.generate("the cat sat", params) for each in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0
    again = train(toy, text, tmp_path / "more", "--steps", "1", "--init", out, "--parallel-tokens", "6")
    assert again.exit_code == 0, again.stderr
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "more").config.vocab_size == saved.config.vocab_size


def test_an_interrupted_run_resumes_where_it_stopped(
    toy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted after its third step and continued gives the files of an undisturbed run."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    asked = ("--steps", "6", "--parallel-tokens", "3", "--checkpoint-every", "0s")
    assert train(toy, text, whole, *asked).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.train.training.stop_on_signal", stopping_after(3))
        assert train(toy, text, cut, *asked).exit_code == 130
    assert train(toy, text, cut, *asked).exit_code == 0
    assert len(read_log(cut / "log.jsonl")) == 6
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_impossible_options_are_refused(toy: Path, text: Path, tmp_path: Path) -> None:
    result = train(toy, text, tmp_path / "draft", "--steps", "1", "--parallel-tokens", "1")
    assert result.exit_code != 0
    assert "--parallel-tokens must be at least 2, not 1" in result.stderr
    with pytest.raises(ForedraftError, match="parallel_tokens is for drafts, which have a target"):
        train_lm(Data((text,)), Start(init=str(toy), parallel_tokens=4), Recipe(steps=1), tmp_path / "lm")


def test_on_texts_every_position_has_the_probabilities_of_the_drafter() -> None:
    llm = LLM(draft_model=embedded_pard(), speculative_tokens=3, num_threads=1)
    ids = list(llm.text_tokenizer("def add(a, b):\n    return a + b\n")["input_ids"])
    draft, drafter = draft_of(llm), llm.drafters["pard"]
    assert isinstance(draft, ParallelDraftModel)
    places = list(draft.logits(ids, 3))
    assert len(places) == 3
    for position in range(1, len(ids) - 2, 3):
        proposal = drafter.propose([request_for(position, ids[:position], 3, temperature=0.7)])
        drafter.forget([position])
        assert proposal.token_probs is not None
        dense = proposal.token_probs.dense(4096)
        for place, logits in enumerate(places):
            q = torch.softmax(logits[position + place].float() / 0.7, -1)
            assert float((q - dense[place]).abs().sum()) < 0.05  # in bfloat16
    assert not isinstance(draft_of(LLM(num_threads=1)), ParallelDraftModel)


def acceptance_by_place(draft: Path, text: str) -> list[float]:
    """The acceptance rates of drafts of four tokens after every token of a text, at temperature 1, without drawing."""
    llm = LLM(draft_model=draft, speculative_tokens=4, num_threads=1)
    ids = llm.text_tokenizer(text)["input_ids"][:400]
    _, of_draws = acceptance_on(llm.target, draft_of(llm), ids, 1.0, first=8, depth=4)
    return of_draws.mean(1).tolist()


@pytest.mark.slow
def test_a_short_training_teaches_the_embedded_draft_to_read_masks(tmp_path: Path) -> None:
    """On a text that it has not learned from. The engine then gives the predicted acceptance."""
    library, texts, tokenizer = Path(sysconfig.get_paths()["stdlib"]), tmp_path / "texts.txt", EMBEDDED / "target"
    texts.write_text("\n<|endoftext|>\n".join((library / f"{name}.py").read_text() for name in _MODULES))
    untrained = with_mask_token(load_for_training(str(EMBEDDED / "draft")), 4096)
    save_model(untrained.bfloat16(), load_tokenizer(tokenizer, LoadOptions()), tmp_path / "untrained")
    rates = LearningRates(matrices=0.01, others=0.002)
    recipe = Recipe(steps=100, context=96, batch_size=8, loss="kl", rates=rates)
    start = Start(init=str(EMBEDDED / "draft"), parallel_tokens=4)
    train_distill(str(EMBEDDED / "target"), Data((texts,)), start, recipe, tmp_path / "trained")
    text = (library / "textwrap.py").read_text()
    before, after = (acceptance_by_place(tmp_path / name, text) for name in ("untrained", "trained"))
    assert all(now > 1.3 * then for now, then in zip(after[1:], before[1:], strict=True))
    assert after[0] > 0.8 * before[0]

    llm = LLM(draft_model=tmp_path / "trained", speculative_tokens=4, num_threads=1)
    prompts = [llm.text_tokenizer(prompt)["input_ids"] for prompt in ("def add(a, b):", "import os\n", "class Node:\n")]
    params, total = SamplingParams(temperature=0.0, max_tokens=40), Expectation.zero(4)
    for prompt, output in zip(prompts, llm.with_drafter("none").generate(prompts, params), strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        of_tokens, _ = acceptance_on(llm.target, draft_of(llm), ids, 0.0, first=len(prompt), depth=4)
        total += expect(of_tokens.numpy(), 4)
    assert measured_tau(llm, prompts, params, 4) == pytest.approx(total.tau, rel=0.03)
