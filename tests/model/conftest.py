"""Fixtures with checkpoints, each made once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.model.zoo import SPECIES, Maker, saved

SHARED = Path(__file__).parents[2].parent / "shared" / "models"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """checkpoint(name): a directory with a random model of that architecture; checkpoint(name, seed): one with other weights."""

    @cache
    def make(name: str, seed: int = 0) -> Path:
        return saved(SPECIES[name].config(), tmp_path_factory.mktemp(name), seed)

    return make


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """A real third-party checkpoint."""
    path = SHARED / "stories260K"
    if not path.is_dir():
        pytest.skip(f"{path} is not there: it belongs to the workplace, not to the repository")
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """Use one thread: toy products are slower on many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
