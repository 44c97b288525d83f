"""The real models that `make models` fetches. A test that needs one has the mark `real_model` and takes a fixture: `smollm2` or
`gemma3`, the GGUF file, or `real_models`, the folder with both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.real_models import RealModel, models_folder

NEEDED = "FOREDRAFT_NEEDS_REAL_MODELS"
"""Set where a missing model is a failure, as in continuous integration."""


def real_model(model: RealModel) -> Path:
    """Its file. Skips the test where it is not there, unless it is needed."""
    file = models_folder() / model.file
    if not file.exists():
        missing = f"{model.name} is not there: make models"
        if os.environ.get(NEEDED):
            pytest.fail(missing)
        pytest.skip(missing)
    return file
