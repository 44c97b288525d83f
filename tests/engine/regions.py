"""Regions whose keys and values identify the tokens that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.region import KEY_MULTIPLE, Region


def keys_of(tokens: Sequence[int]) -> Tensor:
    """[1, R, 2], keys that depend on the token and on all tokens before it."""
    seen, rows = 0, []
    for token in tokens:
        seen = (seen * 31 + token + 1) % 65_521
        rows.append([float(seen), float(token)])
    return torch.tensor(rows).reshape(1, -1, 2)


def write(region: Region, tokens: Sequence[int]) -> None:
    """Write these tokens to a region as a model of two layers would, with values wider than keys."""
    start, whole = len(region.tokens), [*region.tokens, *tokens]
    keys = keys_of(whole)[:, start:]
    for layer in (0, 1):
        seen = region.write(layer, keys + layer, torch.cat([keys, keys], dim=2) - layer, start)
        assert seen[0].shape[1] == seen[1].shape[1] >= len(whole)
        assert seen[0].shape[1] % KEY_MULTIPLE == 0
        assert bool(seen[0].isfinite().all())
        assert bool(seen[1].isfinite().all())
    region.tokens += tokens


def holds_what_it_says(region: Region) -> bool:
    expected = keys_of(region.tokens)
    return not region.tokens or all(
        torch.equal(region.layer(n)[0], expected + n)
        and torch.equal(region.layer(n)[1], torch.cat([expected] * 2, 2) - n)
        for n in (0, 1)
    )
