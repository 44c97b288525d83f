"""Copies numbers to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    numbers: Sequence[float] | Sequence[int] | Sequence[tuple[int, ...]] | Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The numbers as a tensor on the device. A copy from pinned memory does not wait for earlier work of the device, as one from
    pageable memory would."""
    here = torch.as_tensor(numbers, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
