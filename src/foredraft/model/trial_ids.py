"""Token ids for a trial of a model."""

from __future__ import annotations

import torch

_NUM_SPECIAL = 5


def random_ids(length: int, vocab_size: int, generator: torch.Generator) -> list[int]:
    """Random ids other than the first few, which are special in many vocabularies."""
    ids: list[int] = torch.randint(
        min(_NUM_SPECIAL, vocab_size - 1), vocab_size, (length,), generator=generator
    ).tolist()
    return ids
