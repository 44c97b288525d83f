"""The hub is asked for a configuration only if the name may be a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from foredraft.errors import ModelError
from foredraft.model import hub


def test_the_configuration_of_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert hub.config_of(str(tmp_path))["model_type"] == "llama"


def test_the_hub_is_not_asked_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(hub, "hf_hub_download", lambda name, *_, **__: asked.append(name))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert hub.config_of(str(file)) == {}
    assert not asked


def test_a_model_missing_from_the_hub_has_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("not found")

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    assert hub.config_of("somebody/something") == {}


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no connection"), OfflineModeIsEnabled("offline")])
def test_a_hub_that_cannot_be_reached_is_reported_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further requests would each be repeated for half a minute."""

    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", refuse)
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        hub.config_of("somebody/something")
