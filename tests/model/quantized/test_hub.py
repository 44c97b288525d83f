"""Which files of a checkpoint are downloaded."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from foredraft.model.quantized import hub


def test_a_directory_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    assert hub.folder_of(str(tmp_path), "v2") == tmp_path


def test_only_files_that_are_needed_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **kwargs: seen.update(name=name, **kwargs) or tmp_path)
    assert hub.folder_of("someone/some-model", "v2") == tmp_path
    assert (seen["name"], seen["revision"]) == ("someone/some-model", "v2")

    def is_fetched(file: str) -> bool:
        wanted = any(fnmatch(file, pattern) for pattern in seen["allow_patterns"])
        return wanted and not any(fnmatch(file, pattern) for pattern in seen["ignore_patterns"])

    fetched = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
    assert all(map(is_fetched, [*fetched, "model-00001-of-00002.safetensors"]))
    others = ["original/model.safetensors", "metal/model.bin", "consolidated.safetensors", "pytorch_model.bin"]
    assert not any(map(is_fetched, others))
