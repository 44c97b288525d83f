"""Fixtures with the compiled kernels, if this machine has any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foredraft.kernels import Kernels, load_kernels, why_none
from foredraft.kernels.build import INSTRUCTIONS, library
from foredraft.kernels.start import usable_instructions


@pytest.fixture(scope="session", params=INSTRUCTIONS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels for each instruction set that the processor has, not only for the fastest."""
    if load_kernels() is None:
        pytest.skip(f"no compiled kernels here: {why_none()}")
    if request.param not in usable_instructions():
        pytest.skip(f"the processor lacks {request.param}")
    return Kernels(library(request.param))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: toy products are slower on many. Tests of threads set their number themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
