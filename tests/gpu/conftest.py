"""The kernels run on the GPU if there is one, otherwise in Triton's interpreter (see the conftest above)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
