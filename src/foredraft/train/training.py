"""`foredraft train lm` and `foredraft train distill` as functions: from files to a model in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.model import LoadOptions, load_tokenizer
from foredraft.model.encoder_inputs import feature_shape_of
from foredraft.model.mask_token import mask_token_of
from foredraft.model.memory import move
from foredraft.train.corpus import SourceFile
from foredraft.train.head_kinds import MakeObjective
from foredraft.train.interrupt import stop_on_signal
from foredraft.train.model_card import language_model, model_card
from foredraft.train.objectives import BlockReader, Distillation, NextToken, Objective, in_precision
from foredraft.train.optimiser import Optimiser
from foredraft.train.parallel_drafts import ParallelDistillation, check_window, kept_shares, with_mask_token
from foredraft.train.recipe import Data, MemoryUse, Outcome, Recipe, Start, losses_of
from foredraft.train.run_folder import MODEL_CARD, RunFolder, save_model
from foredraft.train.students import (
    check_draft,
    copy_weights,
    from_architecture,
    load_for_training,
    with_fewer_layers,
    with_own_head,
)
from foredraft.train.tasks import TaskRotation
from foredraft.train.texts import read_data
from foredraft.train.trainer import Length, Schedule, Trainer
from foredraft.train.watch import UNWATCHED, Watch
from foredraft.train.written import Writer
from foredraft.utils.machine import process_memory


def train_lm(data: Data, start: Start, recipe: Recipe, out: Path, watch: Watch = UNWATCHED) -> Outcome:
    """Train a language model on text, with next-token loss. start: init, or architecture with a tokenizer.

    Continues an interrupted run with the same arguments. Raises ForedraftError (one line) for input that cannot be used, if
    the loss is not finite, and if the disk is full; saved checkpoints are kept.
    """
    if (start.init is None) == (start.architecture is None):
        raise ForedraftError("give --architecture and --tokenizer, or --init: where the model comes from")
    if start.parallel_tokens is not None:
        raise ForedraftError("parallel_tokens is for drafts, which have a target: use train_distill")
    tokenizer = start.tokenizer or start.init
    if tokenizer is None:
        raise ForedraftError("give --tokenizer: the folder of the tokenizer that the model will use")
    run = _Run("lm", None, data, start, recipe, out, load_tokenizer(tokenizer, LoadOptions()), watch)
    with RunFolder(out).locked():
        return run.execute()


def train_distill(
    target: str, data: Data, start: Start, recipe: Recipe, out: Path, watch: Watch = UNWATCHED
) -> Outcome:
    """Train a draft on the target's distribution, on the files and on texts that the target writes. Otherwise like train_lm."""
    given = [source for source in (start.init, start.architecture, start.layers) if source is not None]
    if len(given) > 1:
        raise ForedraftError("give only one of --init, --architecture and --layers: where the draft comes from")
    tokenizer = load_tokenizer(target, LoadOptions())
    if start.init is not None:
        check_draft(start.init, tokenizer)
    if not given and data.are_pairs:
        raise ForedraftError("give --architecture or --init: what a draft for an encoder-decoder is made from")
    if not given:
        start = replace(start, layers=1)
    with RunFolder(out).locked():
        return _Run("distill", target, data, start, recipe, out, tokenizer, watch).execute()


@dataclass(frozen=True, slots=True)
class _Run:
    """command: "lm" or "distill". target: for a distillation."""

    command: str
    target: str | None
    data: Data
    start: Start
    recipe: Recipe
    out: Path
    tokenizer: PreTrainedTokenizerBase
    watch: Watch

    def execute(self) -> Outcome:
        self.watch.prepare("reading")
        self.start.check_for(self.data)
        texts = read_data(self.data, self.tokenizer, self.recipe)
        folder = RunFolder(self.out)
        arguments = self._arguments(texts.files)
        folder.check_arguments(arguments)
        self.watch.prepare("loading")
        teacher, student = self._models(folder)
        objectives, served = self._objectives(teacher, student, texts.reader)
        folder.begin(arguments)
        if self.target is not None:
            share = self.data.validation_share
            writer = Writer(self.target, self.tokenizer, self.recipe, share, self.out, self.watch)
            texts = texts.with_written(writer)
        tasks = texts.tasks(objectives, self.recipe)
        trainer = Trainer(
            student,
            self._num_logits(student, texts.reader),
            partial(save_model, student, self.tokenizer),
            optimiser_of(student, self.recipe),
            tasks,
            served,
            texts.validation,
            schedule_of(self.recipe, tasks),
            folder,
        )
        outcome = run_trainer(trainer, self.watch, student.num_parameters())
        if outcome.complete:
            self._publish(folder, student, self._model_card(texts.files, tasks, outcome))
        return outcome

    def _arguments(self, files: Iterable[SourceFile[Any]]) -> dict[str, Any]:
        own = {"command": self.command, "target": self.target}
        return {**own, **arguments_of(self.data, self.start, self.recipe, files)}

    def _models(self, folder: RunFolder) -> tuple[PreTrainedModel | None, PreTrainedModel]:
        """-> teacher, student, on the recipe's device"""
        device = LoadOptions(device=self.recipe.device).torch_device()
        teacher = None if self.target is None else load_for_training(self.target).eval().requires_grad_(False)
        student = self._student(teacher, folder)
        for model in (teacher, student):
            if model is not None:
                move(model, device)
                _check_kind(model, self.data)
        _check_context(self.recipe.context, student, teacher)
        return teacher, student

    def _student(self, teacher: PreTrainedModel | None, folder: RunFolder) -> PreTrainedModel:
        """The student, from the last checkpoint or new."""
        if folder.checkpoints:
            return load_for_training(str(folder.checkpoints[-1]))
        student = self._new_student(teacher)
        student = with_own_head(student) if self.start.own_head else student
        return student if self.start.parallel_tokens is None else with_mask_token(student, len(self.tokenizer))

    def _new_student(self, teacher: PreTrainedModel | None) -> PreTrainedModel:
        if self.start.init is not None:
            return load_for_training(self.start.init)
        if self.start.architecture is not None:
            student = from_architecture(self.start.architecture, len(self.tokenizer), self.recipe.seed)
            return student if teacher is None else copy_weights(student, teacher, [])
        assert teacher is not None
        assert self.start.layers is not None
        return with_fewer_layers(teacher, self.start.layers, self.recipe.seed)

    def _num_logits(self, student: PreTrainedModel, reader: BlockReader) -> int:
        """The number of logits per token of a block."""
        vocab_size = int(student.config.get_text_config().vocab_size)
        return ceil(vocab_size * reader.predicted_share * sum(kept_shares(self.start.parallel_tokens or 1)))

    def _objectives(
        self, teacher: PreTrainedModel | None, student: PreTrainedModel, reader: BlockReader
    ) -> tuple[list[Objective], Objective]:
        """-> an objective for each served temperature, and the objective of validation"""
        dtype = self.recipe.dtype
        if teacher is None:
            next_token = in_precision(NextToken(reader), dtype)
            return [next_token], next_token
        losses, served = losses_of(self.recipe)
        make = self._distillation(teacher, student, reader)
        return [in_precision(make(loss), dtype) for loss in losses], in_precision(make(served), dtype)

    def _distillation(self, teacher: PreTrainedModel, student: PreTrainedModel, reader: BlockReader) -> MakeObjective:
        num_places = self.start.parallel_tokens
        if num_places is None:
            return lambda loss: Distillation(teacher, loss, reader)
        mask_token = mask_token_of(student.config.to_dict())
        assert mask_token is not None
        check_window(student, self.recipe.context)
        return lambda loss: ParallelDistillation(teacher, num_places, mask_token, loss)

    def _model_card(self, files: Sequence[SourceFile[Any]], tasks: TaskRotation, outcome: Outcome) -> str:
        student = language_model(self.command, self.target, self.start, self.recipe, of_pairs=self.data.are_pairs)
        return model_card(student, self.target, self.data, self.recipe, files, tasks.num_tokens, outcome)

    def _publish(self, folder: RunFolder, student: PreTrainedModel, card: str) -> None:
        """Save the model in bfloat16, as it will be served. The float32 weights stay in the last checkpoint."""

        def write(to: Path) -> None:
            save_model(student.to("cpu", torch.bfloat16), self.tokenizer, to)
            (to / MODEL_CARD).write_text(card, encoding="utf-8")

        folder.publish(write)


def run_trainer(trainer: Trainer, watch: Watch, num_parameters: int) -> Outcome:
    """Train from the last checkpoint, if any, to the end or until a signal stops it. num_parameters: of the student."""
    forecast = trainer.forecast_memory()
    if forecast is not None:
        watch.memory(forecast)
    trainer.resume()
    with stop_on_signal() as should_stop:
        complete = trainer.run(watch, should_stop)
    memory = process_memory()
    use = None if forecast is None or memory is None else MemoryUse(forecast.peak, memory.highest)
    return Outcome(complete, trainer.step, trainer.seconds, num_parameters, trainer.history, use)


def arguments_of(data: Data, start: Any, recipe: Recipe, files: Iterable[SourceFile[Any]]) -> dict[str, Any]:
    """What identifies a run: everything but how often it is saved, where it is computed, and the licences that its card names.
    start: a dataclass that says what the student is made from. Files are identified by their digests."""
    fields = {**_plain(asdict(data)), **_plain(asdict(start)), **_plain(asdict(recipe))}
    for name in ("checkpoint_every", "device", "licences", "files"):
        fields.pop(name)
    return {"data": {str(file.path): file.digest for file in files}, **fields}


def optimiser_of(student: nn.Module, recipe: Recipe) -> Optimiser:
    """The recipe's optimiser. Muon computes in the precision of the recipe."""
    dtype = torch.float32 if recipe.dtype == "float32" else torch.bfloat16
    return Optimiser(student, recipe.optimiser, recipe.rates, recipe.clip, dtype)


def schedule_of(recipe: Recipe, tasks: TaskRotation) -> Schedule:
    length = Length(recipe.steps, recipe.seconds)
    if recipe.epochs is not None:
        length = Length(steps=max(1, round(recipe.epochs * tasks.num_blocks / recipe.batch_size)))
    return Schedule(length, recipe.batch_size, recipe.seed, recipe.checkpoint_every)


def _plain(value: Any) -> Any:
    """The value with JSON types only."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _check_kind(model: PreTrainedModel, data: Data) -> None:
    """Raises ForedraftError unless pairs are for an encoder-decoder that reads text, and texts for a decoder-only model."""
    if feature_shape_of(model.config) is not None:
        raise ForedraftError("the model reads audio, not text, but --pairs are texts: use another one")
    if bool(model.config.is_encoder_decoder) == data.are_pairs:
        return
    kind, option = (
        ("n encoder-decoder", "--pairs") if model.config.is_encoder_decoder else (" decoder-only model", "--data")
    )
    raise ForedraftError(f"the model is a{kind}: give {option}, the files to train it on")


def _check_context(context: int, *models: PreTrainedModel | None) -> None:
    for model in models:
        longest = None if model is None else getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and context > longest:
            raise ForedraftError(f"--context {context} is longer than the {longest} tokens that the models can read")
