"""Early exits as a kind of head to train: the norm, and an adapter, after one of the target's own layers.

A draft token goes through the same layers, with the same keys and values, as a token of the text. So there is nothing to
unroll: the exit predicts the same after a draft token as after the same token in a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.heads import ExitConfig, TargetShape, load_head
from foredraft.heads.early_exit import load_exit, new_exit
from foredraft.heads.saving import save_exit
from foredraft.model import LanguageModel
from foredraft.model.early_exit import refuse_adapter
from foredraft.model.exits import Exit
from foredraft.train.blocks import IGNORED
from foredraft.train.head_kinds import MakeObjective, architectures_of, check_kept
from foredraft.train.losses import DistillationLoss, LossSums
from foredraft.train.model_card import Student, distilled_by
from foredraft.train.recipe import Recipe
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import TargetStates

_ADAPTER_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class ExitKind:
    """exit_layer: how many of the target's layers draft. adapter_size: the width of the adapter's MLP; 0: only a norm; None: the
    target's hidden size. init: an exit to train further."""

    exit_layer: int
    adapter_size: int | None = None
    init: str | None = None
    reads_pairs: ClassVar[bool] = False
    kernels: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        size = self.adapter_size or 0
        if size < 0 or size % _ADAPTER_MULTIPLE:
            raise ForedraftError(f"--adapter-size must be a multiple of {_ADAPTER_MULTIPLE}, or 0, not {size}")

    def new(self, target: LanguageModel, texts: Sequence[Sequence[int]], seed: int) -> Exit:
        """See HeadKind."""
        shape = TargetShape.of(target.hf.config)
        if not 1 <= self.exit_layer < shape.num_layers:
            raise ForedraftError(f"--exit-layer must be from 1 to {shape.num_layers - 1}, not {self.exit_layer}")
        size = shape.hidden_size if self.adapter_size is None else self.adapter_size
        if size:
            refuse_adapter(target)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return new_exit(target, size)

    def load(self, source: str, target: LanguageModel) -> Exit:
        """See HeadKind."""
        checkpoint = load_head(source, TargetShape.of(target.hf.config))
        config = checkpoint.config
        if not isinstance(config, ExitConfig) or config.layer != self.exit_layer:
            raise ForedraftError(f"{source}: must be a trained exit after layer {self.exit_layer}")
        check_kept(self, source, adapter_size=config.adapter_size)
        return load_exit(config, checkpoint.tensors, target)

    def num_logits(self, head: Exit, target: LanguageModel) -> int:
        """See HeadKind."""
        return TargetShape.of(target.hf.config).vocab_size

    def objectives(self, head: Exit, target: LanguageModel) -> MakeObjective:
        """See HeadKind."""
        states, logits = TargetStates(target, (self.exit_layer,)), TargetLogits.of(target)
        return lambda loss: ExitDistillation(states, logits, loss)

    def save(self, head: Exit, target: LanguageModel, target_name: str, folder: Path, dtype: torch.dtype) -> None:
        """See HeadKind."""
        save_exit(head, self.exit_layer, folder, target_name, architectures_of(target), dtype)

    def describe(self, head: Exit, target_name: str, recipe: Recipe) -> Student:
        """See HeadKind."""
        size = 0 if head.adapter is None else head.adapter.gate_proj.out_features
        adapter = f", and an adapter of width {size} that initially adds nothing" if size else ""
        origin = f"the target's final norm{adapter}" if self.init is None else f"`{self.init}`"
        return Student(
            "head",
            f"An early exit after layer {self.exit_layer} of `{target_name}`",
            origin,
            ("tags: [speculative-decoding, early-exit]",),
            distilled_by(recipe),
        )


@dataclass(frozen=True, slots=True)
class ExitDistillation:
    """Distillation from the target's distribution after every position. states: of the target, for the input of the first skipped
    layer. target_logits: of the student too, which has the target's lm_head."""

    states: TargetStates
    target_logits: TargetLogits
    loss: DistillationLoss

    def __call__(self, student: Exit, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """See Objective."""
        mask = next_ids != IGNORED
        with torch.no_grad():
            hidden, final = self.states(ids)
            distribution = self.loss.distribution(self.target_logits(final[mask]))
        return self.loss(self.target_logits(student(hidden[mask])), distribution, progress)

    def shapes(self, student: Exit, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        yield self.target_logits(student(torch.empty(ids.numel(), self.target_logits.weight.shape[1])))
