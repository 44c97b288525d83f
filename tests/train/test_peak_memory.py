"""The predicted memory of training, compared with that of its tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, load_model
from foredraft.train.block_heads import DFlashKind, DSparkKind
from foredraft.train.eagle3 import Eagle3Kind
from foredraft.train.exit_head import ExitKind
from foredraft.train.losses import DistillationLoss
from foredraft.train.medusa import MedusaKind
from foredraft.train.objectives import Distillation, TextReader, in_precision
from foredraft.train.optimiser import LearningRates, Optimiser
from foredraft.train.peak_memory import MemoryForecast, forecast, pass_memory, pass_shape
from foredraft.utils.machine import ProcessMemory
from foredraft.utils.tensors import num_bytes

KINDS: dict[str, Any] = {
    "eagle3": Eagle3Kind(num_steps=3, draft_vocab_size=512),
    "eagle3 with the target's lm_head": Eagle3Kind(num_steps=2, draft_vocab_size=512, shares_lm_head=True),
    "medusa": MedusaKind(num_heads=3, layers=2),
    "medusa with lm_heads": MedusaKind(num_heads=2, draft_vocab_size=512, own_lm_heads=True),
    "dflash": DFlashKind(block_size=4),
    "dspark": DSparkKind(block_size=4, markov_rank=16),
    "exit": ExitKind(2, 32),
}
SHAPE = (2, 40)
IDS = torch.randint(1, 4096, SHAPE, generator=torch.Generator().manual_seed(0))
NEXT_IDS = torch.cat([IDS[:, 1:], torch.tensor([[7], [9]])], dim=1)


@pytest.fixture(scope="module")
def target(toy: Path) -> LanguageModel:
    return load_model(toy, LoadOptions(dtype="float32", device="cpu", kernels="torch"))


@contextmanager
def kept(student: nn.Module, *others: Tensor) -> Iterator[Callable[[], int]]:
    """Yields a function that counts the bytes saved for the backward pass, without the student's weights and `others`."""
    own = {weight.untyped_storage().data_ptr() for weight in (*student.parameters(), *others)}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for key, storage in storages.items() if key not in own)


@pytest.mark.parametrize("optimiser", ["muon", "adamw"])
@pytest.mark.parametrize("name", KINDS)
def test_gradients_and_optimiser_state_are_predicted_to_the_byte(
    target: LanguageModel, name: str, optimiser: str
) -> None:
    kind = KINDS[name]
    student = kind.new(target, [[5, 6, 7]], seed=0)
    chosen = Optimiser(student, optimiser, LearningRates(), 1.0)
    objective = kind.objectives(student, target)(DistillationLoss("kl", 0.7))
    told = forecast(ProcessMemory(1000, 2000), chosen, pass_memory(student, objective, SHAPE))
    objective(student, IDS, NEXT_IDS, 0.0).loss.backward()
    assert told.gradients == num_bytes([weight.grad for weight in student.parameters() if weight.grad is not None])
    chosen.step(0.5)
    states = [state for part in chosen.state_dict() for state in part["state"].values()]
    assert told.optimiser == num_bytes([value for state in states for value in state.values()])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_activations_are_those_that_a_pass_saves(target: LanguageModel, name: str, dtype: str) -> None:
    """With the gradients of the logits, which the loss saves, but without the indices of the rows it compares, a few bytes each."""
    kind = KINDS[name]
    student = kind.new(target, [[5, 6, 7]], seed=0)
    exact: Any = kind.objectives(student, target)(DistillationLoss("kl", 0.7))
    objective = in_precision(exact, dtype)
    told = pass_memory(student, objective, SHAPE)
    with kept(student, exact.target_logits.weight) as measured:
        objective(student, IDS, NEXT_IDS, 0.0)
        assert told.activations + told.gradients == pytest.approx(measured(), rel=0.05)
    assert told.logits > told.gradients


def test_a_draft_models_activations_are_predicted_too() -> None:
    """Without real numbers transformers makes a mask for each layer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    student, teacher = LlamaForCausalLM(config), LlamaForCausalLM(config).requires_grad_(False)
    objective = Distillation(teacher, DistillationLoss("kl", 0.7), TextReader())
    told = pass_memory(student, objective, SHAPE)
    with kept(student) as measured:
        objective(student, IDS % 300, NEXT_IDS % 300, 0.0)
        assert told.gradients == IDS.numel() * 300 * 4
        assert told.activations + told.gradients == pytest.approx(measured(), rel=0.1)


def test_predicting_does_not_change_the_student(target: LanguageModel) -> None:
    student = Eagle3Kind(num_steps=2).new(target, [[5]], seed=0)
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    pass_memory(student, Eagle3Kind().objectives(student, target)(DistillationLoss()), SHAPE)
    assert all(torch.equal(weight, before[name]) for name, weight in student.state_dict().items())
    assert all(weight.grad is None for weight in student.parameters())


def test_a_batch_is_read_in_passes_that_fit() -> None:
    assert pass_shape(8, 512, 4096) == (4, 512)
    assert pass_shape(2, 512, 4096) == (2, 512)
    assert pass_shape(4, 512, 5 * 16384) == (1, 512)


def test_the_peak_may_have_been_before_training() -> None:
    told = MemoryForecast(before=100, highest_before=300, gradients=10, optimiser=20, activations=30, logits=40)
    assert told.peak == 300
    assert MemoryForecast(100, 150, 10, 20, 30, 40).peak == 200


@pytest.mark.slow
@pytest.mark.parametrize("args", [(), ("--dtype", "bfloat16"), ("--kind", "medusa")])
def test_the_predicted_peak_is_the_measured_one(text: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    """On the embedded target, in a process of its own."""
    command = [
        *(
            sys.executable,
            "-m",
            "foredraft.cli",
            "train",
            "head",
            "--target",
            str(EMBEDDED / "target"),
            "--data",
            str(text),
        ),
        *("--out", str(tmp_path / "head"), "--context", "256", "--batch-size", "4", "--steps", "2", "--json", *args),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    memory = json.loads(done.stdout)["memory"]
    assert memory["predicted"] == pytest.approx(memory["measured"], rel=0.15)
    assert "memory: about" in done.stderr
