"""Results that wait for numbers from a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")


class Pending(Generic[T]):
    """A result that is known once some tensors have been copied to the host.

    tensors: of any shape, on one device. finish: makes the result from their copies on the host.
    """

    def __init__(self, tensors: Sequence[Tensor], finish: Callable[[Sequence[Tensor]], T]) -> None:
        self._tensors = tensors
        self._finish = finish

    def resolve(self) -> T:
        """Wait for the device, once, and return the result."""
        return self._finish(_on_host(self._tensors))

    def then(self, convert: Callable[[T], R]) -> Pending[R]:
        """The pending result that `convert` makes of this one."""
        return Pending(self._tensors, lambda host: convert(self._finish(host)))

    @staticmethod
    def of(result: T) -> Pending[T]:
        """A pending result that is known already."""
        return Pending([], lambda host: result)

    @staticmethod
    def joined(parts: Sequence[Pending[T]]) -> Pending[list[T]]:
        """All of these results as one, which waits for the device only once."""
        tensors = [tensor for part in parts for tensor in part._tensors]

        def finish(copies: Sequence[Tensor]) -> list[T]:
            remaining = iter(copies)
            return [part._finish([next(remaining) for _ in part._tensors]) for part in parts]

        return Pending(tensors, finish)


def _on_host(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same tensors on the host, in one copy, in a dtype that holds them all (token ids are exact in float64)."""
    if len(tensors) < 2:
        return [tensor.cpu() for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
