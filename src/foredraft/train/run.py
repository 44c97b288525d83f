"""`foredraft train` as a function: from files to a model in a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.model import LoadOptions, load_tokenizer
from foredraft.model.loading import move
from foredraft.train.blocks import Blocks, packed, spread_places, tokenised
from foredraft.train.card import card
from foredraft.train.checkpoint import CARD, RunFolder, save_model
from foredraft.train.corpus import SourceFile, held_out, read_file, without
from foredraft.train.generations import Wanted, beginnings, generate
from foredraft.train.loop import (
    Length,
    Schedule,
    StepRecord,
    Trainer,
    interruptible,
)
from foredraft.train.objectives import Distillation, NextToken, Objective, autocast_dtype
from foredraft.train.optimiser import Optimiser
from foredraft.train.recipe import Data, Outcome, Recipe, Start
from foredraft.train.students import (
    check_draft,
    from_architecture,
    load_for_training,
    take_over_weights,
    with_fewer_layers,
    with_own_head,
)
from foredraft.train.turns import Turns, dealt

HELD_OUT = "held-out text"
_MOST_VALIDATION_BLOCKS = 16
_GREEDY_AS = 0.25
"""Greedy decoding has no gradient: a law as sharp as this stands for it."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What a run tells while it goes on. stage: what is done now. share: of the stage. step: one was taken; with the share
    of the run."""

    stage: Callable[[str], None] = lambda _: None
    share: Callable[[float], None] = lambda _: None
    step: Callable[[StepRecord], None] = lambda _: None


def train_lm(data: Data, start: Start, recipe: Recipe, out: Path, watch: Watch = Watch()) -> Outcome:
    """A language model from text, by next-token loss. start: init, or architecture with a tokenizer.

    Goes on where a run with the same arguments was cut off. Raises ForedraftError, one line, for input that cannot be used,
    and where the loss is no number or the disk is full; checkpoints that were saved are kept.
    """
    if (start.init is None) == (start.architecture is None):
        raise ForedraftError("give --architecture and --tokenizer, or --init: where the model comes from")
    place = start.tokenizer or start.init
    if place is None:
        raise ForedraftError("give --tokenizer: the folder of the tokenizer that the model is to use")
    return _run("lm", None, data, start, recipe, out, load_tokenizer(place, LoadOptions()), watch)


def train_distill(target: str, data: Data, start: Start, recipe: Recipe, out: Path, watch: Watch = Watch()) -> Outcome:
    """A draft for a target, by the target's own distribution on the files and on texts of its own. As train_lm."""
    given = [one for one in (start.init, start.architecture, start.layers) if one is not None]
    if len(given) > 1:
        raise ForedraftError("give one of --init, --architecture and --layers: where the draft comes from")
    tokenizer = load_tokenizer(target, LoadOptions())
    if start.init is not None:
        check_draft(start.init, tokenizer)
    return _run("distill", target, data, start if given else replace(start, layers=1), recipe, out, tokenizer, watch)


def _run(
    kind: str,
    target: str | None,
    data: Data,
    start: Start,
    recipe: Recipe,
    out: Path,
    tokenizer: PreTrainedTokenizerBase,
    watch: Watch,
) -> Outcome:
    watch.stage("reading")
    texts = _Texts.read(data, tokenizer, recipe.context)
    folder = RunFolder(out)
    arguments = _arguments(kind, target, data, start, recipe, texts.files)
    folder.agree(arguments)
    watch.stage("loading")
    device = LoadOptions(device=recipe.device).torch_device()
    teacher = None if target is None else load_for_training(target).eval().requires_grad_(False)
    student = _student(start, teacher, folder, tokenizer, recipe.seed)
    for model in (teacher, student):
        if model is not None:
            move(model, device)
    _check_length(recipe.context, student, teacher)
    objectives, served = _objectives(teacher, recipe), _served(teacher, recipe)
    folder.begin(arguments)
    generated = _generated(target, texts.documents, tokenizer.bos_token_id, recipe, out, watch)
    documents = [] if recipe.only_generations else texts.documents
    turns = dealt(documents, generated, objectives, recipe.context, tokenizer.eos_token_id)
    trainer = Trainer(
        student,
        tokenizer,
        Optimiser(student, recipe.optimiser, recipe.rates, recipe.clip),
        turns,
        served,
        texts.validation,
        Schedule(_length(recipe, turns), recipe.batch_size, recipe.seed, recipe.checkpoint_every),
        folder,
    )
    trainer.resume()
    watch.stage("training")
    with interruptible() as stop:
        complete = trainer.run(watch.step, stop)
    outcome = Outcome(complete, trainer.step, trainer.seconds, student.num_parameters(), trainer.history)
    if complete:
        _publish(folder, student, tokenizer, card(kind, target, data, start, recipe, texts.files, turns, outcome))
    return outcome


@dataclass(frozen=True, slots=True)
class _Texts:
    files: list[SourceFile]
    documents: list[list[int]]
    validation: dict[str, Blocks]

    @classmethod
    def read(cls, data: Data, tokenizer: PreTrainedTokenizerBase, context: int) -> _Texts:
        if not data.files:
            raise ForedraftError("give --data: the files to train on")
        if not 0 <= data.validation_share < 1:
            raise ForedraftError(f"--validation-share must be from 0 to below 1, not {data.validation_share}")

        def read(path: Path) -> SourceFile:
            return read_file(path, separator=data.separator, separator_line=data.separator_line, field=data.text_field)

        files = [read(path) for path in data.files]
        apart = {kind: read(path).documents for kind, path in data.validation.items()}
        excluded = [one for path in data.exclude for one in read(path).documents]
        excluded += [one for documents in apart.values() for one in documents]
        documents = without([one for file in files for one in file.documents], excluded)
        if not apart:
            documents, rest = held_out(documents, data.validation_share)
            apart = {HELD_OUT: tuple(rest)} if rest else {}
        if not documents:
            raise ForedraftError(f"{', '.join(str(path) for path in data.files)}: there is no text to train on")
        return cls(
            files,
            tokenised(documents, tokenizer),
            {
                kind: _few(packed(tokenised(rest, tokenizer), context, tokenizer.eos_token_id))
                for kind, rest in apart.items()
            },
        )


def _few(blocks: Blocks) -> Blocks:
    """Evenly chosen ones: validation is to cost little."""
    chosen = spread_places(len(blocks), _MOST_VALIDATION_BLOCKS)
    return blocks.at(chosen)


def _arguments(
    kind: str, target: str | None, data: Data, start: Start, recipe: Recipe, files: Iterable[SourceFile]
) -> dict[str, Any]:
    """What makes a run the run it is: all but how often it is saved, where it is computed, and what its card says of
    licences."""
    asked = {**_plain(asdict(data)), **_plain(asdict(start)), **_plain(asdict(recipe))}
    for name in ("checkpoint_every", "device", "licences", "files"):
        asked.pop(name)
    read = {str(one.path): one.digest for one in files}
    return {"command": kind, "target": target, "data": read, **asked}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _student(
    start: Start,
    teacher: PreTrainedModel | None,
    folder: RunFolder,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
) -> PreTrainedModel:
    if folder.checkpoints:
        return load_for_training(str(folder.checkpoints[-1]))
    student = _begun(start, teacher, tokenizer, seed)
    return with_own_head(student) if start.own_head else student


def _begun(
    start: Start, teacher: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    if start.init is not None:
        return load_for_training(start.init)
    if start.architecture is not None:
        student = from_architecture(start.architecture, len(tokenizer), seed)
        return student if teacher is None else take_over_weights(student, teacher, [])
    assert teacher is not None
    assert start.layers is not None
    return with_fewer_layers(teacher, start.layers, seed)


def _check_length(context: int, *models: PreTrainedModel | None) -> None:
    for model in models:
        longest = None if model is None else getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and context > longest:
            raise ForedraftError(f"--context {context} is longer than the {longest} tokens that the models read")


def _generated(
    target: str | None, documents: list[list[int]], first_id: int | None, recipe: Recipe, out: Path, watch: Watch
) -> list[list[int]]:
    if target is None or not recipe.generations:
        return []
    watch.stage("the target writes")
    prompt_len, max_tokens = max(1, min(32, recipe.context // 4)), min(224, recipe.context // 2)
    wanted = Wanted(recipe.generations, recipe.temperatures, prompt_len, max_tokens, recipe.seed)
    return generate(target, beginnings(documents, recipe.context, first_id), wanted, out, watch.share)


def _objectives(teacher: PreTrainedModel | None, recipe: Recipe) -> list[Objective]:
    """One for each served temperature."""
    dtype = autocast_dtype(recipe.dtype)
    if teacher is None:
        return [NextToken(dtype)]
    return [
        Distillation(teacher, recipe.loss, temperature or _GREEDY_AS, recipe.kl_until, dtype)
        for temperature in recipe.temperatures
    ]


def _served(teacher: PreTrainedModel | None, recipe: Recipe) -> Objective:
    dtype = autocast_dtype(recipe.dtype)
    if teacher is None:
        return NextToken(dtype)
    return Distillation(teacher, "kl", max(recipe.temperatures) or _GREEDY_AS, dtype=dtype)


def _length(recipe: Recipe, turns: Turns) -> Length:
    if recipe.epochs is not None:
        return Length(steps=max(1, round(recipe.epochs * turns.num_blocks / recipe.batch_size)))
    return Length(recipe.steps, recipe.seconds)


def _publish(folder: RunFolder, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """In bfloat16, as it will be run. The weights that were trained stay in the last checkpoint."""

    def write(to: Path) -> None:
        save_model(student.to("cpu", torch.bfloat16), tokenizer, to)
        (to / CARD).write_text(text, encoding="utf-8")

    folder.publish(write)
