"""Copies numbers to a device and back without waiting for other work on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class HostCopy:
    """Numbers on a device and their copy on the host, which is under way. Whoever reads the copy waits for it, but not for work that the
    device was given later."""

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self._host = on_device.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if on_device.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tolist(self) -> Any:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()
