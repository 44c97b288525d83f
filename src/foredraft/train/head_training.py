"""`foredraft train head` as a function: from a target and texts to a head in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.model import LanguageModel, LoadOptions, load_model, load_tokenizer
from foredraft.train.head_kinds import HeadKind
from foredraft.train.model_card import model_card
from foredraft.train.objectives import Objective, in_precision
from foredraft.train.optimiser import Optimiser
from foredraft.train.recipe import Data, Outcome, Recipe, losses_of
from foredraft.train.run_folder import MODEL_CARD, RunFolder
from foredraft.train.tasks import TaskRotation, make_tasks
from foredraft.train.texts import TrainingTexts
from foredraft.train.trainer import Trainer
from foredraft.train.training import arguments_of, run_trainer, schedule_of
from foredraft.train.watch import UNWATCHED, Watch
from foredraft.train.written import Writer


def train_head(
    target: str, data: Data, kind: HeadKind[Any], recipe: Recipe, out: Path, watch: Watch = UNWATCHED
) -> Outcome:
    """Trains a head of this kind for a target, on the files and on texts that the target writes.

    Continues an interrupted run with the same arguments. Raises ForedraftError, one line, for input that cannot be used, if
    the loss is not finite, and if the disk is full; saved checkpoints are kept.
    """
    return _HeadRun(target, data, kind, recipe, out, watch).execute()


@dataclass(frozen=True, slots=True)
class _HeadRun:
    target: str
    data: Data
    kind: HeadKind[Any]
    recipe: Recipe
    out: Path
    watch: Watch

    def execute(self) -> Outcome:
        self.watch.stage("reading")
        tokenizer = load_tokenizer(self.target, LoadOptions())
        texts = TrainingTexts.read(self.data, tokenizer, self.recipe)
        folder = RunFolder(self.out)
        arguments = {
            "command": "head",
            "target": self.target,
            **arguments_of(self.data, self.kind, self.recipe, texts.files),
        }
        folder.check_arguments(arguments)
        folder.begin(arguments)
        share = self.data.validation_share
        written = Writer(self.target, tokenizer, self.recipe, share, self.out, self.watch).write(texts)
        texts = texts.with_held_out(written.held_out, self.recipe.context, tokenizer.eos_token_id, written.count_given)
        self.watch.stage("loading")
        target = load_model(self.target, LoadOptions(device="cpu"))
        target.take_over()
        head = self._head(target, folder, [*texts.documents, *written.texts])
        objectives, served = self._objectives(head, target)
        documents = [] if self.recipe.only_generations else texts.documents
        tasks = make_tasks(
            documents,
            written.by_temperature,
            objectives,
            self.recipe.context,
            tokenizer.eos_token_id,
            written.count_given,
        )
        trainer = self._trainer(head, target, tasks, served, texts, folder)
        outcome = run_trainer(trainer, self.watch, _num_parameters(head))
        if outcome.complete:
            student = self.kind.describe(head, self.target, self.recipe)
            card = model_card(student, self.target, self.data, self.recipe, texts.files, tasks.num_tokens, outcome)
            folder.publish(partial(self._publish, head, target, card))
        return outcome

    def _head(self, target: LanguageModel, folder: RunFolder, texts: list[list[int]]) -> nn.Module:
        """From the last checkpoint, from a head that is given, or new."""
        source = str(folder.checkpoints[-1]) if folder.checkpoints else self.kind.init
        kind: HeadKind[nn.Module] = self.kind
        return kind.new(target, texts, self.recipe.seed) if source is None else kind.load(source, target)

    def _objectives(self, head: nn.Module, target: LanguageModel) -> tuple[list[Objective], Objective]:
        """One for each served temperature, and what validation measures."""
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
        texts: TrainingTexts,
        folder: RunFolder,
    ) -> Trainer:
        return Trainer(
            head,
            self.kind.num_logits(head, target),
            partial(self._save, head, target),
            Optimiser(head, self.recipe.optimiser, self.recipe.rates, self.recipe.clip),
            tasks,
            served,
            texts.validation,
            schedule_of(self.recipe, tasks),
            folder,
        )

    def _publish(self, head: nn.Module, target: LanguageModel, card: str, folder: Path) -> None:
        """In bfloat16, as it will be served. The float32 weights stay in the last checkpoint."""
        self._save(head, target, folder, torch.bfloat16)
        (folder / MODEL_CARD).write_text(card, encoding="utf-8")

    def _save(self, head: nn.Module, target: LanguageModel, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.kind.save(head, target, self.target, folder, dtype)


def _num_parameters(head: nn.Module) -> int:
    return sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
