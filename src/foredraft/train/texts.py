"""The texts of a run: what to train on, and what to validate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self

from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.train.blocks import Blocks, pack, spread_indices, tokenize
from foredraft.train.corpus import (
    Pair,
    SourceFile,
    exclude,
    read_file,
    read_pairs,
    split_held_out,
    split_held_out_pairs,
)
from foredraft.train.objectives import BlockReader, Objective, TextReader
from foredraft.train.pairs import PairIds, PairReader, pair_blocks, tokenize_pairs
from foredraft.train.recipe import Data, Recipe
from foredraft.train.tasks import Task, TaskRotation, make_tasks
from foredraft.train.written import Writer, WrittenTexts

HELD_OUT = "held-out text"
CONVERSATIONS = "conversations"
_MAX_VALIDATION_BLOCKS = 16
"""Validation blocks of each kind of text: few, so that validation is cheap."""


class TrainingData(Protocol):
    """What a run trains on. files: those that were read. validation: blocks by kind of text. reader: how a model reads such blocks."""

    @property
    def files(self) -> Sequence[SourceFile[Any]]: ...

    @property
    def validation(self) -> Mapping[str, Blocks]: ...

    @property
    def reader(self) -> BlockReader: ...

    @property
    def texts(self) -> Sequence[Sequence[int]]:
        """The ids of all texts that a model learns to write."""

    @property
    def longest(self) -> int:
        """The most tokens of a text, or of a source, that a model reads."""

    def with_written(self, writer: Writer) -> Self:
        """The same data with the texts that the target writes for the recipe."""

    def tasks(self, objectives: Sequence[Objective], recipe: Recipe) -> TaskRotation: ...


def read_data(data: Data, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> TrainingData:
    """Read the data of a run. Raises ForedraftError if there is nothing to train on, or for a file that cannot be used."""
    if not 0 <= data.validation_share < 1:
        raise ForedraftError(f"--validation-share must be at least 0 and below 1, not {data.validation_share}")
    if data.are_pairs:
        return TrainingPairs.read(data, tokenizer, recipe)
    return TrainingTexts.read(data, tokenizer, recipe)


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """documents: token ids to train on. questions: for the target to answer. end_id: the id that ends a text. For the other
    fields see TrainingData."""

    files: list[SourceFile[str]]
    documents: list[list[int]]
    questions: list[str]
    validation: dict[str, Blocks]
    end_id: int | None
    longest: int
    written: WrittenTexts = field(default_factory=WrittenTexts.nothing)
    reader: BlockReader = field(default_factory=TextReader)

    @classmethod
    def read(cls, data: Data, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> TrainingTexts:
        """Raises ForedraftError if there is nothing to train on, or for a file that cannot be used."""
        if not data.files and (recipe.generations or not recipe.chats):
            raise ForedraftError("give --data: the files to train on")
        if recipe.prompts and not recipe.chats:
            raise ForedraftError("give --chats: the number of conversations for the target to write from --prompts")
        files = [_read(path, data) for path in data.files]
        questions = [question for path in recipe.prompts for question in _read_questions(path, data)]
        documents, validation = _split([document for file in files for document in file.documents], data)
        if data.files and not documents:
            raise ForedraftError(f"{', '.join(str(path) for path in data.files)}: there is no text to train on")
        blocks = {
            kind: pack(tokenize(texts, tokenizer), recipe.context, tokenizer.eos_token_id)
            for kind, texts in validation.items()
        }
        return cls(
            files,
            tokenize(documents, tokenizer),
            questions,
            {kind: _some(of_kind) for kind, of_kind in blocks.items()},
            tokenizer.eos_token_id,
            recipe.context,
        )

    @property
    def texts(self) -> Sequence[Sequence[int]]:
        """See TrainingData."""
        return [*self.documents, *self.written.texts]

    def with_written(self, writer: Writer) -> TrainingTexts:
        """See TrainingData. Some of the conversations are held out for validation."""
        written = writer.write(self.documents, self.questions)
        if not written.held_out:
            return replace(self, written=written)
        blocks = _some(pack(written.held_out, writer.recipe.context, self.end_id, written.count_given))
        return replace(self, written=written, validation={**self.validation, CONVERSATIONS: blocks})

    def tasks(self, objectives: Sequence[Objective], recipe: Recipe) -> TaskRotation:
        """See TrainingData."""
        documents = [] if recipe.only_generations else self.documents
        written = self.written
        return make_tasks(
            documents, written.by_temperature, objectives, recipe.context, self.end_id, written.count_given
        )


@dataclass(frozen=True, slots=True)
class TrainingPairs:
    """pairs: to train on. longest: tokens of a source, and of a text, in a block. written: for each of the recipe's temperatures, the
    target's answers. For the other fields see TrainingData."""

    files: list[SourceFile[Pair]]
    pairs: list[PairIds]
    longest: int
    validation: dict[str, Blocks]
    written: list[list[PairIds]] = field(default_factory=lambda: [[]])
    reader: BlockReader = field(default_factory=PairReader)

    @classmethod
    def read(cls, data: Data, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> TrainingPairs:
        """Raises ForedraftError if there is nothing to train on, or for a file that cannot be used."""
        if recipe.chats:
            raise ForedraftError(
                "--chats is for decoder-only models: use --generations, the target's answers to sources"
            )
        files = [read_pairs(path, field=data.text_field) for path in data.files]
        pairs, validation = _split_pairs([pair for file in files for pair in file.documents], data)
        if not pairs:
            raise ForedraftError(f"{', '.join(str(path) for path in data.files)}: there are no pairs to train on")
        ids = tokenize_pairs(pairs, tokenizer)
        half = min(recipe.context, max(len(part) for pair in ids for part in pair))
        blocks = {
            kind: _some(pair_blocks(tokenize_pairs(of_kind, tokenizer), half)) for kind, of_kind in validation.items()
        }
        return cls(files, ids, half, blocks)

    @property
    def texts(self) -> Sequence[Sequence[int]]:
        """See TrainingData."""
        return [pair.text for pair in chain(self.pairs, *self.written)]

    def with_written(self, writer: Writer) -> TrainingPairs:
        """See TrainingData."""
        sources = [pair.source[: self.longest] for pair in self.pairs]
        return replace(self, written=writer.answers(sources, self.longest))

    def tasks(self, objectives: Sequence[Objective], recipe: Recipe) -> TaskRotation:
        """See TrainingData. The pairs are split between the objectives."""
        pairs = [] if recipe.only_generations else self.pairs
        number = len(objectives)
        tasks = []
        for index, (objective, written) in enumerate(zip(objectives, self.written, strict=True)):
            tasks.append(Task(pair_blocks([*pairs[index::number], *written], self.longest), objective))
        return TaskRotation(tuple(tasks))


def _some(blocks: Blocks) -> Blocks:
    return blocks.select(spread_indices(len(blocks), _MAX_VALIDATION_BLOCKS))


def _read(path: Path, data: Data) -> SourceFile[str]:
    return read_file(path, separator=data.separator, separator_line=data.separator_line, field=data.text_field)


def _read_questions(path: Path, data: Data) -> list[str]:
    """One per line or .jsonl record. Raises ForedraftError if there is none."""
    documents = read_file(path, separator="\n", field=data.text_field).documents
    if not documents:
        raise ForedraftError(f"{path} contains no prompts: give one per line")
    return [document.removesuffix("\r") for document in documents]


def _split(documents: list[str], data: Data) -> tuple[list[str], Mapping[str, tuple[str, ...]]]:
    """-> documents to train on; documents to validate with, by kind of text"""
    validation = {kind: _read(path, data).documents for kind, path in data.validation.items()}
    excluded = [document for path in data.exclude for document in _read(path, data).documents]
    excluded += [document for texts in validation.values() for document in texts]
    documents = exclude(documents, excluded)
    if validation:
        return documents, validation
    documents, held_out = split_held_out(documents, data.validation_share)
    return documents, {HELD_OUT: tuple(held_out)} if held_out else {}


def _split_pairs(pairs: list[Pair], data: Data) -> tuple[list[Pair], Mapping[str, tuple[Pair, ...]]]:
    """-> pairs to train on; pairs to validate with, by kind. Pairs are kept out of training by their source."""

    def read(path: Path) -> tuple[Pair, ...]:
        return read_pairs(path, field=data.text_field).documents

    validation = {kind: read(path) for kind, path in data.validation.items()}
    kept_out = [pair for path in data.exclude for pair in read(path)]
    kept_out += [pair for of_kind in validation.values() for pair in of_kind]
    sources = {pair.source.strip() for pair in kept_out}
    pairs = [pair for pair in pairs if pair.source.strip() not in sources]
    if validation:
        return pairs, validation
    pairs, held_out = split_held_out_pairs(pairs, data.validation_share)
    return pairs, {HELD_OUT: tuple(held_out)} if held_out else {}
