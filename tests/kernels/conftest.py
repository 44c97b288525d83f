"""The compiled kernels, where this machine has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foredraft.kernels import Kernels, load_kernels, why_none
from foredraft.kernels.build import INSTRUCTIONS, library
from foredraft.kernels.start import usable_instructions


@pytest.fixture(scope="session", params=INSTRUCTIONS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """By all instructions that the processor has, not only by the fastest."""
    if load_kernels() is None:
        pytest.skip(f"no compiled kernels here: {why_none()}")
    if request.param not in usable_instructions():
        pytest.skip(f"the processor lacks {request.param}")
    return Kernels(library(request.param))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Toy products are slower on many threads; a test of threads sets their number itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
