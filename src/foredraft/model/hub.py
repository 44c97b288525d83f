"""Read a checkpoint's config.json, from a directory or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from foredraft.model.checkpoint import CONFIG, raw_config


def config_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """name: a directory or a hub id. Without defaults; empty if it is not available, as for a file, which is not a hub id."""
    if Path(name).is_dir():
        return raw_config(name)
    if Path(name).exists():
        return {}
    try:
        config = json.loads(Path(hf_hub_download(name, CONFIG, revision=revision)).read_bytes())
    except Exception:
        return {}
    return config if isinstance(config, dict) else {}
