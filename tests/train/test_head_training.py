"""Training of heads: the loss, and runs of the command on a toy target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import ForedraftError
from foredraft.heads import EagleConfig, TargetShape, load_head
from foredraft.heads.unrolled import unroll
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model
from foredraft.train.blocks import IGNORED
from foredraft.train.eagle3 import Eagle3Kind
from foredraft.train.head_student import default_taps, frequent_ids, new_eagle3
from foredraft.train.losses import DistillationLoss, TargetDistribution, distillation_loss
from foredraft.train.objectives import fastest_autocast, in_precision
from foredraft.train.recipe import Data, Recipe
from foredraft.train.records import read_log
from foredraft.train.run_folder import RunFolder
from foredraft.train.target_logits import TargetLogits
from foredraft.train.texts import read_data
from foredraft.train.unrolled_drafts import TargetStates, UnrolledDrafts
from tests.train.interrupted import stopping_after

QUICK = ("--context", "16", "--batch-size", "2", "--num-threads", "1")


def head(toy: Path, text: Path, out: Path, *args: str | Path) -> Any:
    given = ("head", "--target", toy, "--data", text, "--out", out, *QUICK, *args)
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in given)])


@pytest.fixture(scope="module")
def target(toy: Path) -> LanguageModel:
    return load_model(toy, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


@pytest.mark.parametrize(("num_layers", "taps"), [(1, (0,)), (2, (1,)), (3, (1, 2)), (8, (2, 4, 7)), (32, (2, 16, 31))])
def test_default_taps_are_layer_inputs(num_layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(num_layers) == taps


def test_the_most_frequent_ids_are_drafted() -> None:
    ids = frequent_ids([[5, 5, 5, 2, 2, 7], [7, 7, 7, 1]], 3, 10)
    assert ids is not None
    assert ids.tolist() == [2, 5, 7]
    assert frequent_ids([[1]], 10, 10) is None
    filled = frequent_ids([[9]], 4, 10)
    assert filled is not None
    assert len(set(filled.tolist())) == 4
    assert 9 in filled.tolist()


def test_states_are_those_of_the_target(target: LanguageModel) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 5, 6]])
    features, final = TargetStates(target, (2, 1))(ids)
    hf: Any = target.hf
    with torch.inference_mode():
        states = hf(ids, output_hidden_states=True).hidden_states
    assert torch.allclose(features, torch.cat([states[2], states[1]], dim=-1), atol=1e-4)
    assert torch.allclose(final, states[-1], atol=1e-4)


def loss_by_hand(
    target: LanguageModel, student: Any, ids: Tensor, next_ids: Tensor, columns: Tensor, num_steps: int, decay: float
) -> float:
    """The loss computed row by row: after position P, step j is compared with the target's distribution after token P + 1 + j."""
    hf: Any = target.hf
    features, _ = TargetStates(target, student.config.taps)(ids)
    with torch.inference_mode():
        target_logits = hf(ids).logits[..., columns]
    tokens = torch.cat([ids[:, 1:], next_ids[:, -1:].clamp(min=0)], dim=1)
    logits = list(unroll(student, features, tokens, num_steps))
    total = 0.0
    for step in range(num_steps):
        for row in range(len(ids)):
            for position in range(ids.shape[1] - 1 - step):
                if next_ids[row, position + step] != IGNORED:
                    q, p = logits[step][row, position][None], target_logits[row, position + 1 + step][None]
                    total += decay**step * float(distillation_loss(q, TargetDistribution.of(p, 0.7), 1.0).loss.detach())
    return total / sum(decay**step for step in range(num_steps))


def test_the_loss_compares_every_draft_token_with_the_target_at_its_position(target: LanguageModel) -> None:
    columns = torch.arange(0, 4096, 4)
    student = new_eagle3(target, (1, 2), columns, seed=0)
    ids = torch.randint(1, 4096, (2, 9), generator=torch.Generator().manual_seed(0))
    next_ids = torch.cat([ids[:, 1:], torch.tensor([[7], [IGNORED]])], dim=1)
    next_ids[1, -3:] = IGNORED
    next_ids[0, 2:4] = IGNORED  # given tokens are read but not predicted
    rows = target.hf.get_output_embeddings().weight[columns].detach()  # type: ignore[union-attr, index]
    objective = UnrolledDrafts(TargetStates(target, (1, 2)), TargetLogits(rows), 3, 0.5, DistillationLoss("kl", 0.7))
    sums = objective(student, ids, next_ids, 0.0)
    expected = loss_by_hand(target, student, ids, next_ids, columns, 3, 0.5)
    assert float(sums.loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert sums.num_rows == 6 + 6
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_mixed_precision_rounds_products_and_keeps_weights(target: LanguageModel) -> None:
    student = new_eagle3(target, (1, 2), None, seed=0)
    ids = torch.randint(1, 4096, (2, 9), generator=torch.Generator().manual_seed(0))
    next_ids = torch.cat([ids[:, 1:], torch.tensor([[7], [IGNORED]])], dim=1)
    objective = Eagle3Kind(num_steps=2).objectives(student, target)(DistillationLoss("kl", 0.7))
    exact, rounded = (in_precision(objective, name)(student, ids, next_ids, 0.0) for name in ("float32", "bfloat16"))
    assert float(rounded.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.05)
    assert not torch.equal(rounded.loss, exact.loss)
    rounded.loss.backward()  # type: ignore[no-untyped-call]
    assert {parameter.grad.dtype for parameter in student.parameters() if parameter.grad is not None} == {torch.float32}


def test_a_head_is_trained_and_drafts(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    asked = ("--steps", "6", "--unroll", "3", "--draft-vocab-size", "512", "--generations", "3", "--json")
    result = head(toy, text, out, *asked)
    assert result.exit_code == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["complete"]
    assert outcome["step"] == 6
    shape = TargetShape.of(AutoModelForCausalLM.from_pretrained(toy).config)
    checkpoint = load_head(str(out), shape)
    assert isinstance(checkpoint.config, EagleConfig)
    assert checkpoint.config.kind == "eagle3"
    assert checkpoint.config.draft_vocab_size == 512
    assert checkpoint.tensors["fc.weight"].dtype == torch.bfloat16
    card = (out / "README.md").read_text()
    for word in ("EAGLE-3", "text.txt", "6 steps", "512"):
        assert word in card
    llm = LLM(toy, out, dtype="float32", speculative_tokens=2)
    assert llm.method == "eagle"
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (one.generate("the cat sat", params) for one in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0


def test_a_head_may_use_the_targets_lm_head(toy: Path, text: Path, tmp_path: Path) -> None:
    """The lm_head is neither trained nor saved, also with a reduced vocabulary, and the head drafts as if it were."""
    out = tmp_path / "head"
    asked = ("--steps", "4", "--draft-vocab-size", "512", "--share-lm-head", "--intermediate-size", "8")
    assert head(toy, text, out, *asked, "--checkpoint-every", "0s").exit_code == 0
    checkpoint = load_head(str(out), TargetShape.of(AutoModelForCausalLM.from_pretrained(toy).config))
    assert isinstance(checkpoint.config, EagleConfig)
    assert not checkpoint.config.owns_lm_head
    assert checkpoint.config.layer.intermediate_size == 8
    assert checkpoint.config.target_ids is not None
    rows = AutoModelForCausalLM.from_pretrained(toy).lm_head.weight.detach()[checkpoint.config.target_ids]
    full = tmp_path / "full"
    shutil.copytree(out, full, ignore=shutil.ignore_patterns("checkpoints"))
    tensors = load_file(full / "model.safetensors")
    save_file({**tensors, "lm_head.weight": rows.bfloat16()}, full / "model.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, second = (LLM(toy, folder, dtype="float32", speculative_tokens=2) for folder in (out, full))
    texts = [llm.generate("the cat sat", params)[0] for llm in (first, second)]
    assert texts[0].metrics.stats == texts[1].metrics.stats
    again = head(toy, text, tmp_path / "again", *asked, "--init", out)
    assert again.exit_code == 0, again.stderr


def test_a_head_in_eight_bits_drafts_and_is_trained_further(toy: Path, text: Path, tmp_path: Path) -> None:
    result = head(toy, text, tmp_path / "head", "--steps", "2", "--quantization", "int8")
    assert result.exit_code == 0, result.stderr
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert stored["fc.weight"].dtype == stored["layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert "stored in int8." in (tmp_path / "head" / "README.md").read_text()
    llm = LLM(toy, tmp_path / "head", dtype="float32", speculative_tokens=2)
    (output,) = llm.generate("the cat sat", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert output.metrics.stats.num_draft_tokens > 0
    again = head(toy, text, tmp_path / "again", "--steps", "2", "--init", tmp_path / "head")
    assert again.exit_code == 0, again.stderr


@pytest.mark.slow
def test_training_brings_the_head_closer_to_the_target(toy: Path, text: Path, tmp_path: Path) -> None:
    result = head(toy, text, tmp_path / "head", "--steps", "40", "--unroll", "2", "--validation-share", "0.2", "--json")
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (kind,) = first["loss"]
    assert last["loss"][kind] < 0.8 * first["loss"][kind]


def test_a_head_is_trained_further(toy: Path, text: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert head(toy, text, first, "--steps", "3").exit_code == 0
    result = head(toy, text, second, "--steps", "3", "--init", first)
    assert result.exit_code == 0, result.stderr
    assert read_log(second / "log.jsonl")[0]["loss"] < read_log(first / "log.jsonl")[0]["loss"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--kind", "hydra", "--steps", "1"),
            "--kind must be one of eagle3, eagle1, medusa, dflash, dspark, exit, decoder, not 'hydra'",
        ),
        (("--taps", "3", "--steps", "1"), r"--taps must be inputs of layers, 0 to 2, not \[3\]"),
        (
            ("--unroll", "0", "--steps", "1"),
            "--unroll, --layers, --intermediate-size and --draft-vocab-size must be at",
        ),
        (("--draft-vocab-size", "-5", "--steps", "1"), "--draft-vocab-size must be at least 1"),
        (("--intermediate-size", "0", "--steps", "1"), "--intermediate-size and --draft-vocab-size must be at least 1"),
        (("--epochs", "inf"), "epochs must be above 0 and finite, not inf"),
        (("--epochs", "nan"), "epochs must be above 0 and finite, not nan"),
        (("--steps", "1", "--licence", "MIT"), "--licence takes FILE=LICENCE, not 'MIT'"),
        (("--steps", "1", "--licence", "other.txt=MIT"), "--licence other.txt: no file of that name is trained on"),
        (("--context", "65", "--steps", "1"), "can read 64 tokens, and not 65: give --context 64"),
        (("--decay", "1.5", "--steps", "1"), "--decay above 0 and at most 1"),
        ((), "give exactly one of --steps, --epochs and --budget"),
        (("--quantization", "int3", "--steps", "1"), "a head can be stored in bfloat16 or int8, not 'int3'"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    toy: Path, text: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = head(toy, text, tmp_path / "head", *args)
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    with pytest.raises(ForedraftError, match=message):
        raise ForedraftError(line)


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("eagle3", ("--layers", "2"), "--layers 1, not 2"),
        ("eagle3", ("--taps", "0"), "--taps (1, 2), not (0,)"),
        ("eagle3", ("--draft-vocab-size", "50"), "--draft-vocab-size 4096, not 50"),
        ("medusa", ("--heads", "3"), "--heads 4, not 3"),
        ("medusa", ("--own-lm-heads",), "--own-lm-heads False, not True"),
        ("dflash", ("--block-size", "5"), "--block-size 8, not 5"),
        ("dspark", ("--markov-rank", "3"), "--markov-rank 64, not 3"),
    ],
)
def test_a_head_that_is_trained_further_keeps_its_shape(
    toy: Path, text: Path, tmp_path: Path, kind: str, option: tuple[str, ...], message: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    given = ("--kind", kind, "--steps", "1")
    assert head(toy, text, first, *given).exit_code == 0
    result = head(toy, text, second, *given, "--init", first, *option)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "a head that is trained further keeps its own" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--kind", "eagle3", "--layers", "2", "--taps", "0", "--draft-vocab-size", "512", "--share-lm-head"),
        ("--kind", "eagle3", "--draft-vocab-size", "5000", "--intermediate-size", "8"),
        ("--kind", "medusa", "--heads", "2", "--layers", "2", "--draft-vocab-size", "512", "--own-lm-heads"),
        ("--kind", "dflash", "--block-size", "4", "--mask-token", "9", "--taps", "0"),
        ("--kind", "dspark", "--markov-rank", "8", "--markov-kind", "gated"),
        ("--kind", "dspark", "--markov-kind", "gated"),
        ("--kind", "exit", "--exit-layer", "2", "--adapter-size", "32"),
    ],
    ids=" ".join,
)
def test_the_options_of_a_head_continue_it(toy: Path, text: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """An interrupted run is resumed, and the finished head is trained further with the same options."""
    out = tmp_path / "head"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foredraft.train.training.stop_on_signal", stopping_after(1))
        cut = head(toy, text, out, "--steps", "2", *options)
    assert cut.exit_code == 130, cut.stderr
    resumed = head(toy, text, out, "--steps", "2", *options)
    assert resumed.exit_code == 0, resumed.stderr
    if "5000" in options:  # all ids: fewer than the number that was given
        options = options[:2]
    further = head(toy, text, tmp_path / "further", "--steps", "1", *options, "--init", out)
    assert further.exit_code == 0, further.stderr


def test_a_head_with_its_own_lm_head_keeps_it(toy: Path, text: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert head(toy, text, first, "--steps", "1").exit_code == 0
    result = head(toy, text, second, "--steps", "1", "--init", first, "--share-lm-head")
    assert result.exit_code == 2
    assert "has an lm_head of its own: leave out --share-lm-head" in result.stderr


def test_drafts_may_be_longer_than_texts(toy: Path, text: Path, tmp_path: Path) -> None:
    """Steps beyond a text compare nothing, so they change its loss only by their weights."""
    results = [
        head(toy, text, tmp_path / str(depth), "--steps", "1", "--context", "4", "--unroll", str(depth), "--decay", "1")
        for depth in (3, 7)
    ]
    assert [result.exit_code for result in results] == [0, 0], results[1].stderr
    losses = [read_log(tmp_path / str(depth) / "log.jsonl")[0]["loss"] for depth in (3, 7)]
    assert losses[1] == pytest.approx(losses[0] * 3 / 7, rel=1e-4)


def test_another_process_does_not_train_in_the_folder(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    with RunFolder(out).locked():
        result = head(toy, text, out, "--steps", "1")
    assert result.exit_code == 2
    assert "another process is training there: wait for it, or give another --out" in result.stderr
    assert not out.exists()
    assert head(toy, text, out, "--steps", "1").exit_code == 0


def test_options_that_do_not_fit_are_refused_before_texts_are_written(toy: Path, text: Path, tmp_path: Path) -> None:
    """The same folder then takes the corrected command."""
    out = tmp_path / "head"
    result = head(toy, text, out, "--steps", "1", "--generations", "2", "--taps", "9")
    assert result.exit_code == 2
    assert not (out / "generations.jsonl").exists()
    assert head(toy, text, out, "--steps", "1", "--generations", "2", "--taps", "2").exit_code == 0
    assert json.loads((out / "training.json").read_text())["taps"] == [2]
    changed = head(toy, text, out, "--steps", "1", "--generations", "2", "--taps", "1")
    assert "contains a run with --taps 2, not --taps 1" in changed.stderr


def test_a_run_with_other_files_is_continued_with_its_own_only(toy: Path, text: Path, tmp_path: Path) -> None:
    """The message names the files that differ, not their checksums."""
    out, other = tmp_path / "head", tmp_path / "other.txt"
    other.write_text(text.read_text()[:-10])
    assert head(toy, text, out, "--steps", "1", "--data", str(other)).exit_code == 0
    changed = head(toy, text, out, "--steps", "1")
    assert changed.exit_code == 2
    assert f"contains a run with other data: {other}, not nothing: give the same" in changed.stderr.replace("\n", " ")
    other.write_text(text.read_text()[:-20])
    changed = head(toy, text, out, "--steps", "1", "--data", str(other))
    assert f"contains a run with other contents of {other}: give the same" in changed.stderr.replace("\n", " ")
    other.write_text(text.read_text()[:-10])
    changed = head(toy, text, out, "--steps", "1", "--data", str(other), "--learning-rate", "0.5")
    assert "contains a run with --learning-rate 0.002, not --learning-rate 0.5" in changed.stderr.replace("\n", " ")


def test_a_file_of_questions_must_have_some(toy: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n \n")
    given = ("head", "--target", toy, "--out", tmp_path / "head", *QUICK, "--steps", "1", "--chats", "2")
    result = CliRunner().invoke(app, [str(arg) for arg in ("train", *given, "--prompts", prompts)])
    assert result.exit_code == 2
    assert "prompts.txt contains no prompts" in result.stderr


def test_lines_of_questions_may_end_as_on_windows(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(b"What did the cat see?\r\nWho sat?\r\n")
    recipe = Recipe(steps=1, chats=2, prompts=(prompts,))
    data = read_data(Data(files=()), AutoTokenizer.from_pretrained(EMBEDDED / "target"), recipe)
    assert data.questions == ["What did the cat see?", "Who sat?"]  # type: ignore[attr-defined]


def test_a_head_may_be_trained_on_conversations_only(toy: Path, tmp_path: Path) -> None:
    """Without files: some conversations are held out, and the card says where the text comes from."""
    folder = tmp_path / "chat-toy"
    shutil.copytree(toy, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<assistant>"
    tokenizer.save_pretrained(folder)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("What did the cat see?\nWho sat on the mat?\n")
    given = ("head", "--target", folder, "--out", tmp_path / "head", *QUICK, "--steps", "2", "--chats", "6", "--json")
    args = [str(arg) for arg in ("train", *given, "--prompts", prompts)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["history"][0]["loss"]) == {"conversations"}
    assert (
        "6 conversations that the target wrote: answers to the questions in prompts.txt"
        in (tmp_path / "head" / "README.md").read_text()
    )
    without = CliRunner().invoke(app, [arg for arg in args if arg not in ("--chats", "6")])
    assert without.exit_code == 2
    assert "give --" in without.stderr


@pytest.mark.parametrize(
    ("features", "expected"),
    [([], "float32"), (["avx2", "avx512_vnni"], "float32"), (["avx512_bf16"], "bfloat16"), (["amx_bf16"], "bfloat16")],
)
def test_bfloat16_is_chosen_where_the_processor_multiplies_it(
    features: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.utils.machine.cpu_features", lambda: features)
    assert fastest_autocast("cpu") == expected
