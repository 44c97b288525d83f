"""The folder that holds a checkpoint's files: the one that was named, or a snapshot from the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download

_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")


def folder_of(name: str, revision: str | None) -> Path:
    """name: a directory or a hub id. Of a hub id only what is read here is fetched, into the hub's cache, at this revision."""
    if Path(name).is_dir():
        return Path(name)
    # patterns cross folders: what lies in some is the same model for other programs
    return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES), ignore_patterns=["*/*"]))
