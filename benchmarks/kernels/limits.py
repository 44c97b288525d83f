"""The limits of a processor, measured: multiplications per second, and bytes per second from memory."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from foredraft.kernels import build

_PEAK_STEPS = 4_000_000
_STREAMED = 200_000_000


def timed(function: Callable[[], object]) -> float:
    """Seconds: processor time on one thread, so that other programs disturb it less, otherwise wall-clock time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


class Peak:
    """The most pairs that the processor multiplies per second: in bfloat16 (float32 if it has no bfloat16 instruction), int8 and int4."""

    def __init__(self, instructions: str) -> None:
        source = Path(__file__).with_name("peak.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "peak.so"
            flags = [*build._FLAGS, *build.INSTRUCTIONS[instructions]]
            subprocess.run([build._compiler(), *flags, str(source), "-o", str(library)], check=True)
            loaded = ctypes.CDLL(str(library))
        self._functions = {
            "bfloat16": loaded.multiply_floats,
            "int8": loaded.multiply_int8,
            "int4": loaded.multiply_int4,
        }
        for function in self._functions.values():
            function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * 2

    def pairs_per_second(self, precision: str) -> float:
        function, threads = self._functions[precision], torch.get_num_threads()
        took = timed(lambda: function(_PEAK_STEPS, threads))
        return float(_PEAK_STEPS / 10 * function(10, threads) / took)


class Bandwidth:
    """The memory bandwidth, as bytes per second read by a sum over 0.8 GB."""

    def __init__(self) -> None:
        self._stream = torch.ones(_STREAMED)

    def bytes_per_second(self) -> float:
        return self._stream.numel() * self._stream.element_size() / timed(self._stream.sum)
