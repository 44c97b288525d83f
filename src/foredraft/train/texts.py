"""The texts of a run: what to train on, and what to validate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.train.blocks import Blocks, CountGiven, pack, spread_indices, tokenize
from foredraft.train.corpus import SourceFile, exclude, read_file, split_held_out
from foredraft.train.recipe import Data, Recipe

HELD_OUT = "held-out text"
CONVERSATIONS = "conversations"
_MAX_VALIDATION_BLOCKS = 16
"""Of each kind of text, so that validation costs little."""


@dataclass(frozen=True, slots=True)
class TrainingTexts:
    """files: as they were read. documents: token ids of what to train on. questions: for the target to answer. validation: blocks
    by kind of text."""

    files: list[SourceFile]
    documents: list[list[int]]
    questions: list[str]
    validation: dict[str, Blocks]

    @classmethod
    def read(cls, data: Data, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> TrainingTexts:
        """Raises ForedraftError if there is nothing to train on, or for a file that cannot be used."""
        if not data.files and (recipe.generations or not recipe.chats):
            raise ForedraftError("give --data: the files to train on")
        if recipe.prompts and not recipe.chats:
            raise ForedraftError("give --chats: how many conversations the target is to write from --prompts")
        if not 0 <= data.validation_share < 1:
            raise ForedraftError(f"--validation-share must be from 0 to below 1, not {data.validation_share}")
        files = [_read(path, data) for path in data.files]
        questions = [read_file(path, separator="\n", field=data.text_field) for path in recipe.prompts]
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
            [question for file in questions for question in file.documents],
            {kind: _some(of_kind) for kind, of_kind in blocks.items()},
        )

    def with_held_out(
        self, conversations: Sequence[Sequence[int]], context: int, end_id: int | None, count_given: CountGiven
    ) -> TrainingTexts:
        """These conversations are to validate with, too; none: nothing changes."""
        if not conversations:
            return self
        blocks = _some(pack(conversations, context, end_id, count_given))
        return replace(self, validation={**self.validation, CONVERSATIONS: blocks})


def _some(blocks: Blocks) -> Blocks:
    return blocks.select(spread_indices(len(blocks), _MAX_VALIDATION_BLOCKS))


def _read(path: Path, data: Data) -> SourceFile:
    return read_file(path, separator=data.separator, separator_line=data.separator_line, field=data.text_field)


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
