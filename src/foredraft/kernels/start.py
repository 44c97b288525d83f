"""Whether the compiled kernels run here: asked once per process, and tested before anything is trusted to them."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch

from foredraft.kernels.build import BuildError, library
from foredraft.kernels.layout import quantised
from foredraft.kernels.native import Kernels

logger = logging.getLogger("foredraft")

_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni")
"""As Linux calls them."""

_ROW_COUNTS = (1, 2, 5, 8, 17)


def load_kernels() -> Kernels | None:
    """The kernels, or None where this machine cannot have them; the log says why, once."""
    return _outcome()[0]


def why_none() -> str | None:
    """Where load_kernels gives None: the reason, in one line."""
    return _outcome()[1]


@cache
def _outcome() -> tuple[Kernels | None, str | None]:
    reason = _missing_features()
    if reason is None:
        try:
            kernels = Kernels(library())
            reason = self_test(kernels)
        except (BuildError, OSError) as error:
            reason = str(error)
        if reason is None:
            return kernels, None
    logger.warning("compiled kernels are not used (%s): PyTorch's own run, more slowly", reason)
    return None, reason


def _missing_features() -> str | None:
    try:
        flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    except OSError:
        return "they are for Linux on x86"
    missing = [name for name in _NEEDED if name not in flags]
    return f"the processor lacks {', '.join(missing)}" if missing else None


@torch.inference_mode()
def self_test(kernels: Kernels) -> str | None:
    """What is wrong with them on this machine, if anything: int8 products must be exact, with the largest numbers too,
    and rows must not depend on how many share a call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_ROW_COUNTS), 320, generator=generator).to(torch.bfloat16)
    x[0], x[1, ::2] = 127.0, -3e38
    weight = torch.randn(80, 320, generator=generator)
    weight[0], weight[1] = 1.0, -1.0
    exact = kernels.pack(weight, int8=True)
    if not torch.equal(kernels.linear(exact, x), linear_int8(weight, x)):
        return "their int8 products are not exact here"
    for matrix in (exact, kernels.pack(weight)):
        whole = kernels.linear(matrix, x)
        if any(not torch.equal(kernels.linear(matrix, x[:count]), whole[:count]) for count in _ROW_COUNTS):
            return "a row's bits depend on how many rows share its product here"
    return None


def linear_int8(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What an int8 product has to give, in plain integers. weight: [n, k] float, x: [T, k] bfloat16 -> [T, n] bfloat16"""
    whole, scales = quantised(weight)
    largest = x.float().abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, torch.div(torch.tensor(127.0), largest), torch.zeros(()))
    rows = (x.float() * inverse).round().to(torch.int64)
    return ((rows @ whole.T.to(torch.int64)).float() * (scales * (largest / 127))).to(torch.bfloat16)
