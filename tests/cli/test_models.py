"""The options that name the models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foredraft.cli.models import ModelOptions
from foredraft.model import EMBEDDED

SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}


@pytest.fixture
def smollm2_folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return str(tmp_path)


def test_the_packaged_head_of_a_model_drafts_with_lookups(smollm2_folder: str) -> None:
    options = ModelOptions(model=smollm2_folder).with_packaged_head()
    assert options.method == "eagle+suffix"
    assert options.draft_model == str(EMBEDDED / "smollm2-head")


def test_other_models_and_given_drafters_stay_as_they_are(smollm2_folder: str) -> None:
    for options in (
        ModelOptions(),
        ModelOptions(model=str(EMBEDDED / "target")),
        ModelOptions(model=smollm2_folder, method="ngram"),
        ModelOptions(model=smollm2_folder, draft_model=str(EMBEDDED / "draft")),
        ModelOptions(model=smollm2_folder, device_map="auto"),
    ):
        assert options.with_packaged_head() == options
