"""Run a computation over static memory: directly, or captured into a CUDA graph the first time and replayed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

_WARM_UPS = 2


class Runner(Protocol):
    """compute: reads memory that never moves, and is the same for the same key. -> its outputs, valid until the next call with any key"""

    def __call__(self, key: Hashable, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]: ...


def at_once(key: Hashable, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """A runner without graphs."""
    return compute()


class Graphs:
    """CUDA graphs by key, all in one memory pool: no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}

    def __call__(self, key: Hashable, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if key not in self._captured:
            self._captured[key] = self._capture(compute)
        graph, outputs = self._captured[key]
        graph.replay()
        return outputs

    def _capture(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # compile kernels and set up libraries outside the capture
                for _ in range(_WARM_UPS):
                    compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device during the capture
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = compute()
        return graph, outputs
