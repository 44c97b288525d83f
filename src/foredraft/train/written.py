"""What the target writes for a run: continuations of the files' texts, and conversations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from foredraft.train.blocks import CountGiven, nothing_given, spread_indices
from foredraft.train.chats import ChatSpec, question_counter, write_chats
from foredraft.train.generations import GenerationSpec, answer, generate, split_documents
from foredraft.train.pairs import PairIds
from foredraft.train.recipe import Recipe
from foredraft.train.watch import Watch

_Texts = list[list[int]]


@dataclass(frozen=True, slots=True)
class WrittenTexts:
    """by_temperature: for each of the recipe's temperatures, the ids of the texts written at it. held_out: conversations to
    validate with. count_given: counts a conversation's tokens before the answer; 0 for other texts."""

    by_temperature: list[_Texts]
    held_out: _Texts
    count_given: CountGiven = nothing_given

    @classmethod
    def nothing(cls) -> WrittenTexts:
        """For a run without a target, which has one objective."""
        return cls([[]], [])

    @property
    def texts(self) -> _Texts:
        """All texts to train on."""
        return [text for texts in self.by_temperature for text in texts]


@dataclass(frozen=True, slots=True)
class Writer:
    """A target that writes texts for a run, each only once: they are kept in `out`. validation_share: the share of conversations
    to hold out."""

    target: str
    tokenizer: PreTrainedTokenizerBase
    recipe: Recipe
    validation_share: float
    out: Path
    watch: Watch

    def write(self, documents: Sequence[Sequence[int]], questions: Sequence[str]) -> WrittenTexts:
        """Write the recipe's generations and chats, if any. documents: to continue. questions: to answer."""
        recipe = self.recipe
        generations = self._generations(documents) if recipe.generations else []
        chats = self._chats(questions) if recipe.chats else []
        held_out = _spread(len(chats), self.validation_share)
        number = len(recipe.temperatures)
        by_temperature = [
            [*generations[n::number], *(chats[i] for i in range(n, len(chats), number) if i not in held_out)]
            for n in range(number)
        ]
        count_given = question_counter(self.tokenizer) if chats else nothing_given
        return WrittenTexts(by_temperature, [chats[i] for i in sorted(held_out)], count_given)

    def answers(self, sources: Sequence[list[int]], max_tokens: int) -> list[list[PairIds]]:
        """What an encoder-decoder writes for some of these sources, evenly spread: a list for each of the recipe's temperatures."""
        recipe, number = self.recipe, len(self.recipe.temperatures)
        if not recipe.generations:
            return [[] for _ in range(number)]
        self._begin(recipe.generations, "generation")
        spec = GenerationSpec(recipe.generations, recipe.temperatures, 0, max_tokens, recipe.seed)
        chosen = [sources[i * len(sources) // spec.number % len(sources)] for i in range(spec.number)]
        texts = answer(self.target, chosen, spec, self.out, self.watch.share)
        pairs = [PairIds(source, text) for source, text in zip(chosen, texts, strict=True)]
        return [pairs[n::number] for n in range(number)]

    def _begin(self, number: int, what: str) -> None:
        self.watch.stage(f"writing {number} {what}{'' if number == 1 else 's'} with the target")

    def _generations(self, documents: Sequence[Sequence[int]]) -> _Texts:
        recipe = self.recipe
        self._begin(recipe.generations, "generation")
        prompt_len, max_tokens = max(1, min(32, recipe.context // 4)), min(224, recipe.context // 2)
        spec = GenerationSpec(recipe.generations, recipe.temperatures, prompt_len, max_tokens, recipe.seed)
        pieces = split_documents(documents, recipe.context, self.tokenizer.bos_token_id)
        return generate(self.target, pieces, spec, self.out, self.watch.share)

    def _chats(self, questions: Sequence[str]) -> _Texts:
        recipe = self.recipe
        self._begin(recipe.chats, "conversation")
        spec = ChatSpec(recipe.chats, recipe.temperatures, recipe.context // 4, recipe.context // 2, recipe.seed)
        return write_chats(self.target, questions, spec, self.out, self.watch.share)


def _spread(total: int, share: float) -> set[int]:
    """Evenly spread indices of this share of all: at least one for a share above 0, but never all of them."""
    number = math.ceil(total * share)
    return set(spread_indices(total, min(number, total - 1))) if total else set()
