"""The folder with a checkpoint's files: the given one, or a snapshot from the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")


def folder_of(name: str, revision: str | None) -> Path:
    """name: a directory or a hub id. For a hub id, only the files that are read here are fetched, into the hub's cache, at this
    revision."""
    if Path(name).is_dir():
        return Path(name)
    # patterns also match in subfolders, which may hold the same model for other programs
    return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES), ignore_patterns=["*/*"]))
