"""`foredraft train head` as a function: from a target and texts to a head in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.errors import ForedraftError
from foredraft.heads.quantized import quantize_head
from foredraft.model import LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.train.head_kinds import HeadKind
from foredraft.train.model_card import model_card
from foredraft.train.objectives import Objective, in_precision
from foredraft.train.recipe import Data, Outcome, Recipe, losses_of
from foredraft.train.run_folder import MODEL_CARD, RunFolder
from foredraft.train.tasks import TaskRotation
from foredraft.train.texts import TrainingData, read_data
from foredraft.train.trainer import Trainer
from foredraft.train.training import arguments_of, optimiser_of, run_trainer, schedule_of
from foredraft.train.watch import UNWATCHED, Watch
from foredraft.train.written import Writer


def train_head(
    target: str,
    data: Data,
    kind: HeadKind[Any],
    recipe: Recipe,
    out: Path,
    watch: Watch = UNWATCHED,
    quantization: str | None = None,
) -> Outcome:
    """Train a head of this kind for a target, on the files and on texts that the target writes. quantization: "int8" stores the
    finished head's matrices in eight bits.

    Continues an interrupted run with the same arguments. Raises ForedraftError (one line) for input that cannot be used, if
    the loss is not finite, and if the disk is full; saved checkpoints are kept.
    """
    if quantization not in (None, "int8"):
        raise ForedraftError(f"a head can be stored in bfloat16 or int8, not {quantization!r}")
    with RunFolder(out).locked():
        return _HeadRun(target, data, kind, recipe, out, watch, quantization or "bfloat16").execute()


@dataclass(frozen=True, slots=True)
class _HeadRun:
    target: str
    data: Data
    kind: HeadKind[Any]
    recipe: Recipe
    out: Path
    watch: Watch
    stored_in: str

    def execute(self) -> Outcome:
        self.watch.prepare("reading")
        tokenizer = load_tokenizer(self.target, LoadOptions())
        texts = read_data(self.data, tokenizer, self.recipe)
        folder = RunFolder(self.out)
        arguments = {
            "command": "head",
            "target": self.target,
            **arguments_of(self.data, self.kind, self.recipe, texts.files),
        }
        folder.check_arguments(arguments)
        if (self.recipe.generations or self.recipe.chats) and not folder.checkpoints:
            # what does not fit is refused before the target writes texts, which may take hours
            self._target_and_head(folder, texts)
        folder.begin(arguments)
        share = self.data.validation_share
        texts = texts.with_written(Writer(self.target, tokenizer, self.recipe, share, self.out, self.watch))
        target, head = self._target_and_head(folder, texts)
        objectives, served = self._objectives(head, target)
        tasks = texts.tasks(objectives, self.recipe)
        trainer = self._trainer(head, target, tasks, served, texts, folder)
        outcome = run_trainer(trainer, self.watch, _num_parameters(head))
        if outcome.complete:
            student = self.kind.describe(head, self.target, self.recipe)
            card = model_card(
                student, self.target, self.data, self.recipe, texts.files, tasks.num_tokens, outcome, self.stored_in
            )
            folder.publish(partial(self._publish, head, target, card))
        return outcome

    def _target_and_head(self, folder: RunFolder, texts: TrainingData) -> tuple[LanguageModel, nn.Module]:
        """The target, and the head to train: from the last checkpoint, from kind.init, or new. Raises ForedraftError if they do not fit."""
        self.watch.prepare("loading")
        target = load_model(self.target, LoadOptions(device="cpu", kernels=self.kind.kernels))
        _check_kind(target, self.kind, self.data)
        _check_context(target, texts.longest)
        target.take_over()
        source = str(folder.checkpoints[-1]) if folder.checkpoints else self.kind.init
        kind: HeadKind[nn.Module] = self.kind
        return target, kind.new(target, texts.texts, self.recipe.seed) if source is None else kind.load(source, target)

    def _objectives(self, head: nn.Module, target: LanguageModel) -> tuple[list[Objective], Objective]:
        """-> an objective for each served temperature, and the objective of validation"""
        make = self.kind.objectives(head, target)
        losses, served = losses_of(self.recipe)
        return [in_precision(make(loss), self.recipe.dtype) for loss in losses], in_precision(
            make(served), self.recipe.dtype
        )

    def _trainer(
        self,
        head: nn.Module,
        target: LanguageModel,
        tasks: TaskRotation,
        served: Objective,
        texts: TrainingData,
        folder: RunFolder,
    ) -> Trainer:
        return Trainer(
            head,
            self.kind.num_logits(head, target),
            partial(self._save, head, target),
            optimiser_of(head, self.recipe),
            tasks,
            served,
            texts.validation,
            schedule_of(self.recipe, tasks),
            folder,
        )

    def _publish(self, head: nn.Module, target: LanguageModel, card: str, folder: Path) -> None:
        """Save the head as it will be served. The float32 weights stay in the last checkpoint."""
        if self.stored_in == "int8":
            self._save(head, target, folder)
            quantize_head(folder)
        else:
            self._save(head, target, folder, torch.bfloat16)
        (folder / MODEL_CARD).write_text(card, encoding="utf-8")

    def _save(self, head: nn.Module, target: LanguageModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.kind.save(head, target, self.target, folder, dtype)


def _check_kind(target: LanguageModel, kind: HeadKind[Any], data: Data) -> None:
    """Raises ForedraftError unless kind, target and data are all for encoder-decoders, or all for decoder-only models."""
    if kind.reads_pairs != target.has_encoder:
        what, others = (
            ("an encoder-decoder", "decoder-only models")
            if target.has_encoder
            else ("a decoder-only model", "encoder-decoders")
        )
        raise ForedraftError(
            f"{target.traits.name} is {what}, but heads of this kind are for {others}: use another --kind"
        )
    if kind.reads_pairs != data.are_pairs:
        option = "--pairs" if kind.reads_pairs else "--data"
        raise ForedraftError(f"give {option}: the kind of text that the target reads in use")


def _check_context(target: LanguageModel, length: int) -> None:
    """length: of the longest text or source that is read."""
    traits = target.traits
    longest = min(traits.context_len, traits.source_len or traits.context_len)
    if length > longest:
        raise ForedraftError(f"{traits.name} can read {longest} tokens, and not {length}: give --context {longest}")


def _num_parameters(head: nn.Module) -> int:
    return sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
