"""Detects which checkpoints are heads, from their configuration and the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foredraft.heads import head_method_of
from foredraft.heads.detection import _method_by_config
from foredraft.model import EMBEDDED
from tests.heads.checkpoints import golden
from tests.heads.random_heads import embedded_head
from tests.heads.test_eagle import FORMS


@pytest.mark.parametrize(("form", "file"), FORMS.items())
def test_eagle_heads_are_recognised_by_their_files(form: str, file: str, tmp_path: Path) -> None:
    assert head_method_of(str(golden(form).save(tmp_path, file))) == "eagle"


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa_heads_are_recognised_by_their_files(file: str, tmp_path: Path) -> None:
    assert head_method_of(str(golden("medusa").save(tmp_path, file))) == "medusa"


def test_models_and_missing_files_are_no_heads(tmp_path: Path) -> None:
    assert head_method_of(str(EMBEDDED / "draft")) is None
    assert head_method_of(str(EMBEDDED / "target")) is None
    assert head_method_of(str(tmp_path)) is None
    assert head_method_of(str(tmp_path / "is not there")) is None


def test_detection_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = embedded_head("medusa")
    load = torch.load

    def without_data(*args: object, **options: object) -> object:
        assert options["map_location"] == "meta"
        return load(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "load", without_data)
    assert head_method_of(str(folder)) == "medusa"


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"speculators_model_type": "eagle3"}, "eagle"),
        ({"speculators_model_type": "early_exit"}, "early_exit"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle"),
        ({"model_type": "eagle"}, "eagle"),
        ({"medusa_num_heads": 5}, "medusa"),
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "llama", "num_hidden_layers": 1}, None),
        ({}, None),
    ],
)
def test_a_hub_id_is_recognised_by_its_configuration(config: dict[str, object], method: str | None) -> None:
    assert _method_by_config(json.loads(json.dumps(config))) == method
