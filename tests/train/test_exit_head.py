"""Training of early exits: the loss, and runs of the command on a toy target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import ForedraftError, ModelError
from foredraft.model import LanguageModel, LoadOptions, load_model
from foredraft.train.blocks import IGNORED
from foredraft.train.exit_head import ExitKind
from foredraft.train.losses import DistillationLoss
from foredraft.train.records import read_log
from tests.model.zoo import SPECIES, random_model

QUICK = ("--context", "16", "--batch-size", "2", "--num-threads", "1")
IDS = torch.tensor([[5, 6, 7, 8], [9, 5, 5, 6]])
NEXT_IDS = torch.tensor([[6, 7, 8, IGNORED], [5, 5, IGNORED, 2]])


def head(toy: Path, text: Path, out: Path, *args: str | Path) -> Any:
    given = ("head", "--kind", "exit", "--target", toy, "--data", text, "--out", out, *QUICK, *args)
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in given)])


@pytest.fixture(scope="module")
def target(toy: Path) -> LanguageModel:
    return load_model(toy, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


def test_the_loss_compares_the_exit_with_the_target_at_the_same_position(target: LanguageModel) -> None:
    kind, hf = ExitKind(2, 32), target.hf
    exit = kind.new(target, [], seed=0)
    for parameter in exit.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    sums = kind.objectives(exit, target)(DistillationLoss("kl", 0.7))(exit, IDS, NEXT_IDS, 0.0)
    with torch.inference_mode():
        outputs: Any = hf(IDS, output_hidden_states=True)  # type: ignore[operator]
        logits = hf.get_output_embeddings()(exit(outputs.hidden_states[2]))
    mask = NEXT_IDS != IGNORED
    log_q, log_p = (functional.log_softmax(each[mask] / 0.7, dim=-1) for each in (logits, outputs.logits))
    expected = functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    assert float(sums.loss.detach()) == pytest.approx(float(expected), rel=1e-3)
    assert sums.num_rows == 6
    sums.loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in exit.parameters())


@pytest.mark.parametrize("adapter_size", ["0", "32"])
def test_an_exit_is_trained_and_drafts(toy: Path, text: Path, tmp_path: Path, adapter_size: str) -> None:
    out = tmp_path / "exit"
    asked = (
        "--exit-layer",
        "1",
        "--adapter-size",
        adapter_size,
        "--steps",
        "30",
        "--validation-share",
        "0.2",
        "--json",
    )
    result = head(toy, text, out, *asked)
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (sort,) = first["loss"]
    assert last["loss"][sort] < first["loss"][sort]
    card = (out / "README.md").read_text()
    assert "An early exit after layer 1" in card
    llm = LLM(toy, out, dtype="float32", speculative_tokens=2)
    assert llm.method == "early_exit"
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (each.generate("the cat sat", params) for each in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0


def test_an_exit_is_trained_further(toy: Path, text: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert head(toy, text, first, "--exit-layer", "1", "--steps", "20").exit_code == 0
    result = head(toy, text, second, "--exit-layer", "1", "--steps", "1", "--init", first)
    assert result.exit_code == 0, result.stderr
    assert read_log(second / "log.jsonl")[0]["loss"] < read_log(first / "log.jsonl")[0]["loss"]
    result = head(
        toy, text, tmp_path / "third", "--exit-layer", "1", "--adapter-size", "0", "--init", first, "--steps", "1"
    )
    assert result.exit_code == 2
    assert "was made with --adapter-size 16, not 0" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--kind exit needs --exit-layer"),
        (("--exit-layer", "3"), "--exit-layer must be from 1 to 2, not 3"),
        (("--exit-layer", "1", "--adapter-size", "20"), "--adapter-size must be a multiple of 32, or 0, not 20"),
        (("--exit-layer", "1", "--unroll", "2"), "--unroll does not apply to --kind exit: leave it out"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    toy: Path, text: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = head(toy, text, tmp_path / "exit", "--steps", "1", *args)
    assert result.exit_code == 2, result.stderr
    (line,) = result.stderr.splitlines()
    with pytest.raises(ForedraftError, match=message):
        raise ForedraftError(line)


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", "torch"), ("bfloat16", "auto")])
def test_an_adapter_is_refused_before_training_for_a_target_that_could_not_run_it(
    dtype: str, kernels: str, tmp_path: Path
) -> None:
    random_model(SPECIES["gemma3"].config()).save_pretrained(tmp_path)
    target = load_model(tmp_path, LoadOptions(dtype=dtype, device="cpu", kernels=kernels))
    with pytest.raises(ModelError, match="--adapter-size 0"):
        ExitKind(1).new(target, [], seed=0)
    assert ExitKind(1, adapter_size=0).new(target, [], seed=0).adapter is None
