"""Recognises texts by their tokens: vLLM moves them between rows, and tells a proposer neither which text a row holds nor when one
ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.engine.sequence import TokenSequence
from foredraft.sampling import Sampler, SamplingParams

NUM_COMPARED = 48
"""Tokens compared at the end of a text. Mistaking one text for another only lowers the acceptance rate."""
MOST_CALLS_UNSEEN = 256
"""A text counts as ended after so many calls without it."""


class Row(NamedTuple):
    """A text in one step. new_ids: the last tokens of its history, written since the last call; empty for a text that was not seen
    before."""

    sequence: TokenSequence
    new_ids: Sequence[int]


@dataclass(slots=True)
class _Text:
    """last_seen: the number of the last call that included it."""

    sequence: TokenSequence
    last_seen: int

    def new_ids_in(self, history: NDArray[np.int32], length: int) -> list[int]:
        """The tokens after the text in a history of this length; [] if the history does not continue the text."""
        tokens = self.sequence.tokens
        end = len(tokens)
        if end >= length:
            return []
        known = tokens[-NUM_COMPARED:]
        recent = history[end - len(known) : length].tolist()
        return recent[len(known) :] if recent[: len(known)] == known else []


class Texts:
    """max_len: of the longest text. speculative_tokens: of each text, as in TokenSequence."""

    def __init__(self, max_len: int, speculative_tokens: int | None) -> None:
        self._max_len = max_len
        self._speculative_tokens = speculative_tokens
        self._ids = count()
        self._call = 0
        self._by_row: list[_Text | None] = []
        self._texts: dict[int, _Text] = {}
        self._params = SamplingParams(temperature=0.0).resolve({})
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._texts)

    def read(
        self, sampled: Sequence[Sequence[int]], lens: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> list[Row | None]:
        """The text in each row; None for a row that is still reading its prompt.

        sampled: the new tokens of each row in the step. lens, tokens: the length of each row's history, and the histories [B, L], new
        tokens included. Tokens that are kept are copied.
        """
        self._call += 1
        former, by_row = self._by_row, list[_Text | None]()
        rows: list[Row | None] = []
        for place, (new_ids, length) in enumerate(zip(sampled, lens[: len(sampled)].tolist(), strict=True)):
            if not len(new_ids):
                by_row.append(None)
                rows.append(None)
                continue
            before = former[place] if place < len(former) else None
            text, ids = self._find(tokens[place], length, len(new_ids), before)
            if text is None:
                text = self._new(tokens[place, :length].tolist(), len(new_ids))
            text.sequence.extend(ids)
            text.last_seen = self._call
            rows.append(Row(text.sequence, ids))
            by_row.append(text)
        self._by_row = by_row
        return rows

    def ended(self) -> list[int]:
        """Forget texts that were not seen in the last MOST_CALLS_UNSEEN calls -> their ids. Most calls do not look: there may be many
        texts."""
        if self._call % (1 + MOST_CALLS_UNSEEN // 8):
            return []
        first = self._call - MOST_CALLS_UNSEEN
        old = [seq_id for seq_id, text in self._texts.items() if text.last_seen <= first]
        for seq_id in old:
            del self._texts[seq_id]
        return old

    def clear(self) -> list[int]:
        """Forget all of them -> their ids"""
        ids = [*self._texts]
        self._texts, self._by_row = {}, []
        return ids

    def _find(
        self, history: NDArray[np.int32], length: int, num_new: int, before: _Text | None
    ) -> tuple[_Text | None, list[int]]:
        """The text that a history of this length continues, unless another row of this call holds it, and its new tokens. before: the
        row's previous text, which is tried first; it may have grown by more tokens than this call reports."""
        if before is not None and before.last_seen < self._call:
            ids = before.new_ids_in(history, length)
            if ids:
                return before, ids
        for text in self._texts.values():
            if text.last_seen < self._call and len(text.sequence.tokens) == length - num_new:
                ids = text.new_ids_in(history, length)
                if ids:
                    return text, ids
        return None, []

    def _new(self, tokens: list[int], num_new: int) -> _Text:
        seq_id, prompt_len = next(self._ids), len(tokens) - num_new
        sampler = Sampler(self._params, tokens[:prompt_len], self._generator)
        sequence = TokenSequence(
            seq_id, tokens, sampler, self._max_len + 1, self._speculative_tokens, prompt_len=max(prompt_len, 1)
        )
        text = self._texts[seq_id] = _Text(sequence, self._call)
        return text
