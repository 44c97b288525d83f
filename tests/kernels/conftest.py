"""The compiled kernels, where this machine has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foredraft.kernels import Kernels, load_kernels, why_none


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    loaded = load_kernels()
    if loaded is None:
        pytest.skip(f"no compiled kernels here: {why_none()}")
    return loaded


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Toy products are slower on many threads; a test of threads sets their number itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
