"""Documents as blocks of equal length, and which blocks a step reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.text.tokenizing import encode_prompt

NOTHING = -100
"""What follows a token that nothing follows: such places count in no loss."""


_ORDERS = 16
"""That are kept: of this epoch and the next, for each set of blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """ids: [N, L] int32, what is read. following: [N, L] int32, the token behind each of them, or NOTHING."""

    ids: Tensor
    following: Tensor

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return int((self.following != NOTHING).sum())

    def at(self, places: Iterable[int]) -> Blocks:
        chosen = list(places)
        return Blocks(self.ids[chosen], self.following[chosen])


def joined(parts: Sequence[Blocks]) -> Blocks:
    """One behind the other; of equal length."""
    return Blocks(torch.cat([part.ids for part in parts]), torch.cat([part.following for part in parts]))


def tokenised(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of each document, begun as the tokenizer begins a text, and ended by its end-of-sequence token unless that
    is also what the next one begins with."""
    ends = [] if tokenizer.eos_token_id in (None, tokenizer.bos_token_id) else [tokenizer.eos_token_id]
    return [encode_prompt(tokenizer, document) + ends for document in documents]


def packed(documents: Sequence[Sequence[int]], length: int, end_id: int | None) -> Blocks:
    """One document after the other, cut every `length` tokens. Each token but the very first is predicted exactly once;
    the end of the last document is predicted too, where there is an end_id. Only the last block is filled up.

    Raises ForedraftError where there is nothing to predict.
    """
    stream = [token for document in documents for token in document]
    if end_id is not None and stream and stream[-1] != end_id:
        stream.append(end_id)
    if len(stream) < 2:
        raise ForedraftError("there is no text to train on: the files hold fewer than two tokens")
    read, following = stream[:-1], stream[1:]
    missing = -len(read) % length
    ids = torch.tensor(read + [read[-1]] * missing, dtype=torch.int32).view(-1, length)
    after = torch.tensor(following + [NOTHING] * missing, dtype=torch.int32).view(-1, length)
    return Blocks(ids, after)


def batch_places(seed: int, step: int, batch_size: int, num_blocks: int) -> list[int]:
    """Which blocks a step reads: a pure function, so that a run goes on from any step. Every block comes once an epoch, in
    an order of the epoch's own."""
    first = step * batch_size
    return [
        _order(seed, place // num_blocks, num_blocks)[place % num_blocks] for place in range(first, first + batch_size)
    ]


def spread_places(total: int, at_most: int) -> list[int]:
    """Of 0..total-1, all or so many, evenly."""
    count = min(total, at_most)
    return [i * total // count for i in range(count)]


@lru_cache(maxsize=_ORDERS)
def _order(seed: int, epoch: int, num_blocks: int) -> list[int]:
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    order: list[int] = torch.randperm(num_blocks, generator=noise).tolist()
    return order
