"""Training of Medusa heads: their initial weights, their loss, and runs of the command on a toy target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import ForedraftError
from foredraft.heads import MedusaConfig, TargetShape, load_head
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train import MedusaKind
from foredraft.train.blocks import IGNORED
from foredraft.train.losses import DistillationLoss, TargetDistribution, distillation_loss
from foredraft.train.medusa import PlacedDrafts
from foredraft.train.records import read_log
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import TargetStates
from tests.train.interrupted import stopping_after

QUICK = ("--kind", "medusa", "--context", "16", "--batch-size", "2", "--num-threads", "1")


def train(toy: Path, text: Path, out: Path, *args: str | Path) -> Any:
    given = ("head", "--target", toy, "--data", text, "--out", out, *QUICK, *args)
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in given)])


@pytest.fixture(scope="module")
def target(toy: Path) -> LanguageModel:
    return load_model(toy, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


@pytest.mark.parametrize("is_shared", [True, False])
def test_new_heads_give_the_targets_own_logits(target: LanguageModel, is_shared: bool) -> None:
    kind = MedusaKind(num_heads=2, layers=2, draft_vocab_size=512, own_lm_heads=not is_shared)
    heads = kind.new(target, [[5, 6, 7]], seed=0)
    hidden = torch.randn(3, heads.config.target_hidden_size)
    lm_head: Any = target.hf.get_output_embeddings()
    expected = lm_head(hidden)[:, heads.config.target_ids]
    logits = heads(hidden)
    assert logits.shape == (3, 2, 512)
    for head in range(2):
        assert torch.allclose(logits[:, head], expected, atol=1e-5)
    assert heads.config.target_ids is not None
    assert {5, 6, 7} <= set(heads.config.target_ids.tolist())


def test_the_loss_compares_every_head_with_the_target_at_its_position(target: LanguageModel) -> None:
    """After position P head h is compared with the target's distribution after token P + 1 + h, row by row."""
    columns = torch.arange(0, 4096, 4)
    kind = MedusaKind(num_heads=3)
    student = kind.new(target, [], seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in student.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    student.config = MedusaConfig(
        num_heads=3, target_hidden_size=0, vocab_size=4096, draft_vocab_size=1024, shares_lm_head=True
    )
    student.lm_head.weight.data = student.lm_head.weight.data[columns]
    ids = torch.randint(1, 4096, (2, 9), generator=generator)
    next_ids = torch.cat([ids[:, 1:], torch.tensor([[7], [IGNORED]])], dim=1)
    next_ids[1, -3:] = IGNORED
    lm_head: Any = target.hf.get_output_embeddings()
    states = TargetStates(target, ())
    sums = PlacedDrafts(states, TargetLogits(lm_head.weight[columns].detach()), 0.5, DistillationLoss("kl", 0.7))(
        student, ids, next_ids, 0.0
    )
    hf: Any = target.hf
    with torch.inference_mode():
        output = hf(ids, output_hidden_states=True)
        logits, target_logits = (
            student(output.hidden_states[-1].flatten(0, 1)).view(2, 9, 3, -1),
            output.logits[..., columns],
        )
    expected = 0.0
    for head in range(3):
        for row in range(2):
            for position in range(9 - 1 - head):
                if next_ids[row, position + head] != IGNORED:
                    q, p = logits[row, position, head][None], target_logits[row, position + 1 + head][None]
                    expected += 0.5**head * float(
                        distillation_loss(q, TargetDistribution.of(p, 0.7), 1.0).loss.detach()
                    )
    assert float(sums.loss.detach()) == pytest.approx(expected / 1.75, rel=1e-4)
    assert sums.num_rows == 8 + 6
    student.requires_grad_(True)
    again = PlacedDrafts(states, TargetLogits(lm_head.weight[columns].detach()), 0.5, DistillationLoss("kl", 0.7))(
        student, ids, next_ids, 0.0
    )
    again.loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_heads_are_trained_and_draft(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    result = train(toy, text, out, "--steps", "6", "--heads", "3", "--draft-vocab-size", "512", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["complete"]
    checkpoint = load_head(str(out), TargetShape.of(AutoModelForCausalLM.from_pretrained(toy).config))
    assert isinstance(checkpoint.config, MedusaConfig)
    assert (checkpoint.config.num_heads, checkpoint.config.draft_vocab_size) == (3, 512)
    assert checkpoint.config.shares_lm_head
    card = (out / "README.md").read_text()
    for word in ("Medusa heads", "text.txt", "6 steps", "512", "3 heads"):
        assert word in card
    llm = LLM(toy, out, dtype="float32", speculative_tokens=3)
    assert llm.method == "medusa"
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (each.generate("the cat sat", params) for each in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0


@pytest.mark.parametrize("lm_heads", [(), ("--own-lm-heads",)])
def test_training_brings_the_heads_closer_to_the_target(
    toy: Path, text: Path, tmp_path: Path, lm_heads: tuple[str, ...]
) -> None:
    asked = ("--steps", "40", "--heads", "2", "--validation-share", "0.2", "--json", *lm_heads)
    result = train(toy, text, tmp_path / "heads", *asked)
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (kind,) = first["loss"]
    assert last["loss"][kind] < 0.8 * first["loss"][kind]


def test_an_interrupted_run_resumes_where_it_stopped(
    toy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted after its third step and continued gives the files of an undisturbed run."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    asked = ("--steps", "6", "--heads", "2", "--checkpoint-every", "0s")
    assert train(toy, text, whole, *asked).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr("foredraft.train.training.stop_on_signal", stopping_after(3))
        assert train(toy, text, cut, *asked).exit_code == 130
    assert not (cut / "config.json").exists()
    assert train(toy, text, cut, *asked).exit_code == 0
    assert len(read_log(cut / "log.jsonl")) == 6
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_heads_are_trained_further(toy: Path, text: Path, tmp_path: Path) -> None:
    """The second run begins where the first one ended, up to the rounding of the saved weights."""
    first, second = tmp_path / "first", tmp_path / "second"
    asked = ("--heads", "2", "--validation-share", "0.2", "--json")
    before = json.loads(train(toy, text, first, "--steps", "20", *asked).stdout)["history"]
    result = train(toy, text, second, "--steps", "1", "--init", first, *asked)
    assert result.exit_code == 0, result.stderr
    after = json.loads(result.stdout)["history"]
    (kind,) = before[0]["loss"]
    assert after[0]["loss"][kind] == pytest.approx(before[-1]["loss"][kind], rel=0.05)
    assert after[0]["loss"][kind] < 0.9 * before[0]["loss"][kind]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--unroll", "2"), "--unroll does not apply to --kind medusa: leave it out"),
        (
            ("--kind", "eagle3", "--heads", "2"),
            "--heads does not apply to --kind eagle3: leave it out",
        ),
        (("--heads", "0"), "--heads, --layers and --draft-vocab-size must be at least 1"),
        (("--draft-vocab-size", "-3"), "--draft-vocab-size must be at least 1"),
        (("--decay", "1.5"), "--decay above 0 and at most 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    toy: Path, text: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = train(toy, text, tmp_path / "heads", "--steps", "1", *args)
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    with pytest.raises(ForedraftError, match=message):
        raise ForedraftError(line)
