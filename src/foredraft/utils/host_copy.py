"""Copies numbers from a device while it goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Numbers on a device and their copy on the host, which is under way. Whoever reads the copy waits for it, but not for work that the
    device was given later.

    host: the memory of the copy, which may be overwritten once the copy has been read. copied: recorded after the copy; None if it is
    complete.
    """

    def __init__(self, on_device: Tensor, host: Tensor, copied: torch.cuda.Event | None) -> None:
        self.on_device = on_device
        self._host, self._copied = host, copied
        self._numbers: list[Any] | None = None

    def tolist(self) -> list[Any]:
        if self._numbers is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._numbers = self._host.tolist()
        return self._numbers
