"""Sizes of tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes that the elements of the tensors take. A tensor counts as often as it is given."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
