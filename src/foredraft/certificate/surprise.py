"""How unlikely a token was, as a bounded number to bet on."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.sampling import TokenProbs

_MOST = 16.0
_CHUNK = 1 << 20
"""Elements of distributions that are processed at a time."""


def surprise(p: Tensor) -> Tensor:
    """-log p, bounded and scaled to at most 1."""
    return (-p.clamp(min=1e-300).log()).clamp(max=_MOST) / _MOST


def centred_surprise(p: Tensor) -> Tensor:
    """The surprise of each token of a distribution, minus the mean. [V] -> [V]"""
    h = surprise(p)
    return h - (p * h).sum()


def surprise_of_drawn(token_probs: TokenProbs, rows: Tensor, ids: Tensor) -> Tensor:
    """The surprise of tokens drawn from these distributions, each minus the mean of its own. rows, ids: [N] -> [N] float64, with
    mean 0 if they really were"""
    size = max(1, _CHUNK // token_probs.probs.shape[1])
    return torch.cat(
        [_of_drawn(token_probs, *part) for part in zip(torch.split(rows, size), torch.split(ids, size), strict=True)]
    )


def _of_drawn(token_probs: TokenProbs, rows: Tensor, ids: Tensor) -> Tensor:
    q = token_probs.probs[rows].to(torch.float64)
    mean = (q * surprise(q)).sum(1) / q.sum(1)
    return surprise(token_probs.at(rows, ids[:, None])[:, 0].to(torch.float64)) - mean
