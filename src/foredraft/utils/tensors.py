"""Sizes of tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """What the numbers of these tensors take, each counted as often as it is given."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
