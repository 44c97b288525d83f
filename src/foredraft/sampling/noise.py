"""Shared noise: a pure function of (seed, child, position, token id).

It uses a counter-based hash (the splitmix64 finaliser, Steele, Lea and Flood 2014) instead of a generator: the noise of each id can
be computed alone, so only kept ids need it, and target and draft model get the same noise without sharing a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.sampling.devices import to_device

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def stream_keys(seed: int, child: int, position: int, count: int) -> list[int]:
    """The 64-bit keys of `count` draws from this position on. The noise of token `id` is hash(key + id * gamma)."""
    key = _mix(_mix(seed + _GAMMA) + (child + 1) * _GAMMA)
    return [_signed(_mix(key + (place + 1) * _GAMMA)) for place in range(position, position + count)]


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def exponentials(keys: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    """Exp(1) noise for each id under its row's key, in float64. keys: R numbers, or int64 on the device of ids; ids: [R, W] or [W]
    -> [R, W]

    `argmax(p / E)` draws from p, and equals `argmax(log p + Gumbel)` with one logarithm instead of three.
    """
    own = keys if isinstance(keys, Tensor) else to_device(keys, ids.device, torch.int64)
    z = own[:, None] + ids * _signed(_GAMMA)
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    z = z ^ _shifted(z, 31)
    # 52 bits plus half a step: never 0, never 1, exact in float64
    uniform = (_shifted(z, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(uniform)


def shared_scores(probs: Tensor, keys: Sequence[int] | Tensor, ids: Tensor | None = None) -> Tensor:
    """Scores whose argmax in each row is a draw. probs: [R, W], of ids [R, W] (None: of 0 .. W - 1); keys: R -> [R, W] float64"""
    if ids is None:
        ids = torch.arange(probs.shape[1], device=probs.device)
    return probs.to(torch.float64) / exponentials(keys, ids)
