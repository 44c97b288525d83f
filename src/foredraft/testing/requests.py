"""Requests for testing drafters: short histories over few ids, so that they repeat themselves. They are the same in every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Any

import torch

from foredraft.engine.proposal import DraftRequest, Features
from foredraft.sampling import Sampler, SamplingParams

Batch = list[tuple[list[int], int]]
"""The (history, max_len) of each request."""

_LONGEST, _MOST_DRAFT, _MOST_ROWS, _NUM_IDS = 40, 6, 4, 4
_MODULUS = 10_007


def request_for(seq_id: int, tokens: Sequence[int], max_len: int, **params: Any) -> DraftRequest:
    """A request like an engine's. params: those of SamplingParams; greedy by default."""
    resolved = SamplingParams(**{"temperature": 0.0, **params}).resolve({})
    return DraftRequest(seq_id, tokens, max_len, Sampler(resolved, tokens[:1], torch.Generator().manual_seed(seq_id)))


def requests_for(batch: Batch, **params: Any) -> list[DraftRequest]:
    return [request_for(i, list(tokens), max_len, **params) for i, (tokens, max_len) in enumerate(batch)]


def with_features(request: DraftRequest, size: int) -> DraftRequest:
    """The request with features [T, size] of a made-up target for all tokens but the pending one: each row is a function of the tokens
    up to its own."""
    hashes = accumulate(request.tokens[:-1], lambda state, token: (31 * state + token + 1) % _MODULUS, initial=0)
    angles = torch.tensor([*hashes][1:], dtype=torch.float32)[:, None] * torch.arange(1, size + 1)
    return replace(request, features=Features(torch.sin(angles)))


def histories(count: int, seed: int, vocab_size: int) -> Iterator[list[int]]:
    """Random histories of 1 to 40 of the first few ids, so that there is something to copy, and now and then the last id of the
    vocabulary."""
    random = Random(seed)
    for _ in range(count):
        ids = [*range(min(_NUM_IDS, vocab_size)), vocab_size - 1]
        weights = [1.0] * (len(ids) - 1) + [0.1]
        yield random.choices(ids, weights, k=random.randint(1, _LONGEST))


def batches(count: int, seed: int, vocab_size: int) -> Iterator[Batch]:
    """Ragged batches of 0 to 4 requests, some of which may draft nothing."""
    random = Random(seed)
    for i in range(count):
        size = random.randint(0, _MOST_ROWS)
        found = histories(size, 1000 * seed + i, vocab_size)
        yield [(tokens, random.randint(0, _MOST_DRAFT)) for tokens in found]
