"""Recognises texts by their tokens: vLLM moves them between its rows, and says neither whose a row is nor when a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.engine.sequence import TokenSequence
from foredraft.sampling import Sampler, SamplingParams

NUM_COMPARED = 48
"""Tokens at the end of a text. A text that is taken for another costs acceptance and nothing else."""
MOST_CALLS_UNSEEN = 256
"""After so many calls a text counts as ended."""


class Row(NamedTuple):
    """What a text got in a step. new_ids: the last tokens of its history, written since the last call; empty for a text that is
    new to us."""

    sequence: TokenSequence
    new_ids: Sequence[int]


class Texts:
    """max_len: the longest text. speculative_tokens: of each of them, as in TokenSequence."""

    def __init__(self, max_len: int, speculative_tokens: int | None) -> None:
        self._max_len = max_len
        self._speculative_tokens = speculative_tokens
        self._ids = count()
        self._call = 0
        self._by_row: list[TokenSequence | None] = []
        self._last_seen: dict[int, int] = {}
        self._texts: dict[int, TokenSequence] = {}
        self._params = SamplingParams(temperature=0.0).resolve({})
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._texts)

    def read(
        self, sampled: Sequence[Sequence[int]], lens: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> list[Row | None]:
        """What each row holds now; None for one that is still reading its prompt.

        sampled: what each row got in the step. lens, tokens: the length of each row's history, and the histories [B, L], what the
        row got included. They are copied where they are kept.
        """
        self._call += 1
        former, claimed = self._by_row, set[int]()
        rows: list[Row | None] = []
        for place, new_ids in enumerate(sampled):
            if not len(new_ids):
                rows.append(None)
                continue
            history = tokens[place, : int(lens[place])]
            before = former[place] if place < len(former) else None
            row = self._row(history, len(new_ids), before, claimed)
            claimed.add(row.sequence.seq_id)
            self._last_seen[row.sequence.seq_id] = self._call
            rows.append(row)
        self._by_row = [None if row is None else row.sequence for row in rows]
        return rows

    def ended(self) -> list[int]:
        """Texts that were not seen for long; they are forgotten."""
        old = [seq_id for seq_id, seen in self._last_seen.items() if self._call - seen >= MOST_CALLS_UNSEEN]
        for seq_id in old:
            del self._last_seen[seq_id], self._texts[seq_id]
        return old

    def clear(self) -> list[int]:
        """Forget all of them -> their ids"""
        ids = [*self._texts]
        self._texts, self._last_seen, self._by_row = {}, {}, []
        return ids

    def _row(self, history: NDArray[np.int32], num_new: int, before: TokenSequence | None, claimed: set[int]) -> Row:
        """before: the row's former text, which is tried first; it may have grown unseen."""
        sequence = before
        if sequence is None or sequence.seq_id in claimed or not _continues(sequence, history):
            length = len(history) - num_new
            others = (each for each in self._texts.values() if len(each.tokens) == length)
            sequence = next((each for each in others if each.seq_id not in claimed and _continues(each, history)), None)
        if sequence is None:
            return Row(self._new(history.tolist(), num_new), ())
        new_ids = history[len(sequence.tokens) :].tolist()
        sequence.commit(new_ids, len(new_ids))
        return Row(sequence, new_ids)

    def _new(self, tokens: list[int], num_new: int) -> TokenSequence:
        seq_id, prompt_len = next(self._ids), len(tokens) - num_new
        sampler = Sampler(self._params, tokens[:prompt_len], self._generator)
        sequence = TokenSequence(
            seq_id, tokens, sampler, self._max_len + 1, self._speculative_tokens, prompt_len=max(prompt_len, 1)
        )
        self._texts[seq_id] = sequence
        return sequence


def _continues(sequence: TokenSequence, history: NDArray[np.int32]) -> bool:
    """Whether a history is the text and more."""
    end = len(sequence.tokens)
    if end >= len(history):
        return False
    start = max(0, end - NUM_COMPARED)
    return bool(np.array_equal(history[start:end], sequence.tokens[start:]))
