"""Tokenizers by name; those of the shared models are left out where the models are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.toy_tokenizers import BUILD, IN_SHARED, MODELS, READ_BYTES


@pytest.fixture(scope="session")
def shared() -> Path:
    if not MODELS.is_dir():
        pytest.skip(f"the shared models are not at {MODELS}")
    return MODELS


@pytest.fixture(params=list(BUILD), scope="session")
def name(request: pytest.FixtureRequest) -> str:
    if request.param in IN_SHARED:
        request.getfixturevalue("shared")
    return str(request.param)


@pytest.fixture(params=READ_BYTES, scope="session")
def byte_name(request: pytest.FixtureRequest) -> str:
    if request.param in IN_SHARED:
        request.getfixturevalue("shared")
    return str(request.param)
