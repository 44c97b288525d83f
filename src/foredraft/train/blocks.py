"""Packs documents into blocks of equal length, and chooses the blocks that a step reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.text.tokenizing import encode_prompt

IGNORED = -100
"""The next id of a position without a next token, or whose next token is given. Such positions count in no loss."""
ROW_MULTIPLE = 64
"""Matrix products have a multiple of this many rows, because PyTorch compiles and keeps one for every number of rows."""
_MAX_ORDERS = 16
"""Orders that are cached: those of this epoch and the next, for each set of blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """ids: [N, L] int32, the tokens to read. next_ids: [N, L] int32, the token after each of them, or IGNORED."""

    ids: Tensor
    next_ids: Tensor

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are predicted."""
        return int((self.next_ids != IGNORED).sum())

    def select(self, indices: Iterable[int]) -> Blocks:
        selected = list(indices)
        return Blocks(self.ids[selected], self.next_ids[selected])


def draft_generator(ids: Tensor, progress: float) -> torch.Generator:
    """Decides which drafts a pass trains. It is determined by the texts, so that a resumed run reads the same, and by the progress, so
    that each epoch reads other drafts of the same text. ids: [B, L]. progress: the share of the run that is over."""
    return torch.Generator().manual_seed(int(ids.sum()) ^ int(progress * (1 << 52)))


def concatenate(parts: Sequence[Blocks]) -> Blocks:
    """All blocks of the parts; they must be of equal length."""
    return Blocks(torch.cat([part.ids for part in parts]), torch.cat([part.next_ids for part in parts]))


def tokenize(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of each document. They begin as the tokenizer begins a text, and end with its end-of-sequence token, unless
    texts also begin with that token."""
    ends = [] if tokenizer.eos_token_id in (None, tokenizer.bos_token_id) else [tokenizer.eos_token_id]
    return [encode_prompt(tokenizer, document) + ends for document in documents]


CountGiven: TypeAlias = Callable[[Sequence[int]], int]
"""Counts the tokens at the beginning of a text that are given, such as a question: they are read but not predicted."""


def nothing_given(text: Sequence[int]) -> int:
    """See CountGiven."""
    return 0


def pack(
    documents: Sequence[Sequence[int]], length: int, end_id: int | None, count_given: CountGiven = nothing_given
) -> Blocks:
    """One document after the other, cut every `length` tokens. Every token except the very first and those that are given is
    predicted exactly once. With an end_id, the end of the last document is predicted too. Only the last block is padded;
    blocks in which nothing is predicted are left out.

    Raises ForedraftError if there is nothing to predict.
    """
    stream = [token for document in documents for token in document]
    predicted = [token for document in documents for token in _predicted(document, count_given(document))]
    if end_id is not None and stream and stream[-1] != end_id:
        stream.append(end_id)
        predicted.append(end_id)
    if len(stream) < 2:
        raise ForedraftError("there is no text to train on: the files contain fewer than two tokens")
    ids, next_ids = stream[:-1], predicted[1:]
    num_padding = -len(ids) % length
    blocks = Blocks(
        torch.tensor(ids + [ids[-1]] * num_padding, dtype=torch.int32).view(-1, length),
        torch.tensor(next_ids + [IGNORED] * num_padding, dtype=torch.int32).view(-1, length),
    )
    predicts = (blocks.next_ids != IGNORED).any(1)
    if not bool(predicts.any()):
        raise ForedraftError("there is no text to train on: all tokens are given, and none is left to predict")
    return Blocks(blocks.ids[predicts], blocks.next_ids[predicts])


def _predicted(document: Sequence[int], num_given: int) -> list[int]:
    return [*[IGNORED] * num_given, *document[num_given:]]


def batch_indices(seed: int, step: int, batch_size: int, num_blocks: int) -> list[int]:
    """The blocks that a step reads: a pure function, so that a run can resume at any step. Every block is read once per epoch,
    in an order specific to that epoch."""
    first = step * batch_size
    return [_order(seed, i // num_blocks, num_blocks)[i % num_blocks] for i in range(first, first + batch_size)]


def spread_indices(total: int, at_most: int) -> list[int]:
    """at_most evenly spread indices of 0..total-1; all of them if there are no more."""
    count = min(total, at_most)
    return [i * total // count for i in range(count)]


@lru_cache(maxsize=_MAX_ORDERS)
def _order(seed: int, epoch: int, num_blocks: int) -> list[int]:
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    order: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
    return order
