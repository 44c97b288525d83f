"""The real models that `make models` downloads. A test that needs one has the mark `real_model` and uses a fixture: `smollm2` or
`gemma3`, a GGUF file, or `real_models`, the folder with both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.real_models import RealModel, models_folder

NEEDED = "FOREDRAFT_NEEDS_REAL_MODELS"
"""The variable that makes a missing model a failure, as in continuous integration."""


def real_model(model: RealModel) -> Path:
    """A model's file. Skip the test where it is missing, unless the environment requires it."""
    file = models_folder() / model.file
    if not file.exists():
        missing = f"{model.name} is not there: make models"
        if os.environ.get(NEEDED):
            pytest.fail(missing)
        pytest.skip(missing)
    return file
