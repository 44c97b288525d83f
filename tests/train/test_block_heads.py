"""Training of block drafters: the loss, and runs of the command on a toy target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft import LLM, SamplingParams
from foredraft.errors import ForedraftError
from foredraft.heads import DFlashConfig, TargetShape, load_head
from foredraft.heads.config import Markov
from foredraft.heads.unrolled_blocks import unroll_blocks
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train.block_drafts import BlockDrafts, drawn_anchors, num_anchors
from foredraft.train.blocks import IGNORED, draft_generator
from foredraft.train.head_student import new_block_head, rarest_id
from foredraft.train.losses import DistillationLoss, TargetDistribution, distillation_loss
from foredraft.train.records import read_log
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import TargetStates
from tests.train.test_head_training import head


@pytest.fixture(scope="module")
def target(toy: Path) -> LanguageModel:
    return load_model(toy, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


def test_the_mask_is_a_token_that_is_in_no_text() -> None:
    assert rarest_id([[0, 1, 2], [2, 4, 1]], 6) == 5
    assert rarest_id([[0, 1, 1, 2, 2]], 3) == 0


@pytest.mark.parametrize("correction", [None, Markov(8), Markov(8, "gated"), Markov(8, "rnn")])
def test_every_weight_of_a_new_head_is_initialised(target: LanguageModel, correction: Markov | None) -> None:
    student = new_block_head(target, (1, 2), 9, seed=0, block_size=4, correction=correction)
    assert [name for name, weight in student.state_dict().items() if not weight.isfinite().all()] == []


@pytest.mark.parametrize("length", [1, 2, 9, 64])
def test_anchors_follow_from_the_text_and_have_one_before(length: int) -> None:
    ids = torch.randint(1, 99, (3, length), generator=torch.Generator().manual_seed(1))
    is_predicted = torch.ones(ids.shape, dtype=torch.bool)
    anchors = drawn_anchors(is_predicted, 4, draft_generator(ids, 0.0))
    assert torch.equal(anchors, drawn_anchors(is_predicted, 4, draft_generator(ids, 0.0)))
    assert length < 9 or not torch.equal(anchors, drawn_anchors(is_predicted, 4, draft_generator(ids, 0.01)))
    assert anchors.shape == (3, num_anchors(length, 4))
    assert bool((anchors >= min(1, length - 1)).all() and (anchors < length).all())
    assert all(len(set(row.tolist())) == len(row) for row in anchors)


def test_anchors_have_a_predicted_token_as_far_as_there_are_enough() -> None:
    is_predicted = torch.zeros(3, 20, dtype=torch.bool)
    is_predicted[0, 7] = is_predicted[1, 11:] = is_predicted[2, 0] = True
    anchors = drawn_anchors(is_predicted, 4, torch.Generator().manual_seed(1))
    assert anchors.shape == (3, 4)
    assert 7 in anchors[0]
    assert bool((anchors[1] >= 11).all())
    assert all(len(set(row.tolist())) == len(row) for row in anchors)


def loss_by_hand(
    target: LanguageModel, student: Any, ids: Tensor, next_ids: Tensor, anchor_every: int, decay: float
) -> float:
    """The loss computed draft by draft: position p after the anchor s is compared with the target's distribution after token s + p."""
    hf: Any = target.hf
    features, _ = TargetStates(target, student.config.taps)(ids)
    with torch.inference_mode():
        target_logits = hf(ids).logits
    anchors, means, weights = drawn_anchors(next_ids != IGNORED, anchor_every, draft_generator(ids, 0.0)), [], []
    for place, logits in enumerate(unroll_blocks(student, features, ids, anchors)):
        losses = []
        for number, (row, anchor) in enumerate((b, int(a)) for b in range(len(ids)) for a in anchors[b]):
            if anchor + place < ids.shape[1] and next_ids[row, anchor + place] != IGNORED:
                p = TargetDistribution.of(target_logits[row, anchor + place][None], 0.7)
                losses.append(float(distillation_loss(logits[number][None], p, 1.0).loss.detach()))
        if losses:
            means.append(sum(losses) / len(losses))
            weights.append(decay**place)
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights)


@pytest.mark.parametrize("correction", [None, Markov(8), Markov(8, "rnn")])
def test_the_loss_compares_every_position_with_the_target(target: LanguageModel, correction: Markov | None) -> None:
    student = new_block_head(target, (1, 2), 7, seed=0, block_size=4, correction=correction)
    for table in student.lm_heads:
        torch.nn.init.normal_(table.weight, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    ids = torch.randint(1, 4096, (2, 14), generator=torch.Generator().manual_seed(0))
    next_ids = torch.cat([ids[:, 1:], torch.tensor([[7], [IGNORED]])], dim=1)
    next_ids[1, -3:] = IGNORED
    next_ids[0, 2:4] = IGNORED  # given tokens are read but not predicted
    rows = target.hf.get_output_embeddings().weight.detach()  # type: ignore[union-attr]
    objective = BlockDrafts(TargetStates(target, (1, 2)), TargetLogits(rows), 2, 0.5, DistillationLoss("kl", 0.7))
    sums = objective(student, ids, next_ids, 0.0)
    assert sums.num_rows == int((next_ids != IGNORED).sum())
    expected = loss_by_hand(target, student, ids, next_ids, 2, 0.5)
    assert float(sums.loss.detach()) / sums.num_rows == pytest.approx(expected, rel=1e-4)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    without = {name for name, parameter in student.named_parameters() if parameter.grad is None}
    assert without == set()


@pytest.mark.parametrize("predicted", [[], [0], [1], [13], [5, 8], [3, 10]])
def test_the_loss_of_a_text_with_few_predicted_tokens(target: LanguageModel, predicted: list[int]) -> None:
    """Also where some positions of a draft, or all, have nothing to predict."""
    student = new_block_head(target, (1, 2), 7, seed=0, block_size=4, correction=None)
    ids = torch.randint(1, 4096, (1, 14), generator=torch.Generator().manual_seed(0))
    next_ids = torch.full_like(ids, IGNORED)
    next_ids[0, predicted] = 7
    rows = target.hf.get_output_embeddings().weight.detach()  # type: ignore[union-attr]
    objective = BlockDrafts(TargetStates(target, (1, 2)), TargetLogits(rows), 5, 0.5, DistillationLoss("kl", 0.7))
    sums = objective(student, ids, next_ids, 0.0)
    sums.loss.backward()  # type: ignore[no-untyped-call]
    if predicted in ([], [0]):  # no draft begins before a text's second token
        assert (float(sums.loss.detach()), sums.acceptance, sums.num_rows) == (0, 0, 0)
    else:
        assert sums.num_rows == len(predicted)
        assert float(sums.loss.detach()) / sums.num_rows == pytest.approx(
            loss_by_hand(target, student, ids, next_ids, 5, 0.5), rel=1e-4
        )


@pytest.mark.parametrize(("kind", "places"), [("dflash", 4), ("dspark", 5)])
def test_a_head_is_trained_and_drafts(kind: str, places: int, toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    rank = ("--markov-rank", "8") if kind == "dspark" else ()
    result = head(toy, text, out, "--kind", kind, "--steps", "6", "--block-size", "5", "--json", *rank)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["complete"]
    checkpoint = load_head(str(out), TargetShape.of(AutoModelForCausalLM.from_pretrained(toy).config))
    assert isinstance(checkpoint.config, DFlashConfig)
    assert (checkpoint.config.kind, checkpoint.config.num_places) == (kind, places)
    assert not checkpoint.config.owns_lm_head
    card = (out / "README.md").read_text()
    assert all(word in card for word in ("text.txt", "6 steps", f"{places} tokens in one pass"))
    llm = LLM(toy, out, dtype="float32", speculative_tokens=3)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (one.generate("the cat sat", params) for one in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0
    further = head(toy, text, tmp_path / "further", "--kind", kind, "--steps", "3", "--init", out)
    assert further.exit_code == 0, further.stderr
    assert read_log(tmp_path / "further" / "log.jsonl")[0]["loss"] < read_log(out / "log.jsonl")[0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_brings_the_head_closer_to_the_target(kind: str, toy: Path, text: Path, tmp_path: Path) -> None:
    asked = ("--kind", kind, "--steps", "40", "--block-size", "4", "--validation-share", "0.2", "--json")
    result = head(toy, text, tmp_path / "head", *asked)
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (name,) = first["loss"]
    assert last["loss"][name] < 0.8 * first["loss"][name]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kind", "pard"), "--kind pard: PARD is an ordinary draft model: foredraft train distill --parallel-tokens"),
        (("--kind", "dflash", "--markov-rank", "8"), "--markov-rank does not apply to --kind dflash"),
        (("--kind", "dflash", "--mask-token", "4096"), "--mask-token must be an id of the target, 0 to 4095, not 4096"),
        (("--kind", "dspark", "--markov-kind", "lstm"), "--markov-kind one of vanilla, gated, rnn"),
        (("--kind", "dspark", "--block-size", "1"), "--block-size at least 2"),
        (("--kind", "dflash", "--taps", "3"), r"--taps must be inputs of layers, 0 to 2, not \[3\]"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    toy: Path, text: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = head(toy, text, tmp_path / "head", "--steps", "1", *args)
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    with pytest.raises(ForedraftError, match=message):
        raise ForedraftError(line)
