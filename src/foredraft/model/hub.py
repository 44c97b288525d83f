"""Read a checkpoint's config.json, from a directory or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from foredraft.errors import ModelError
from foredraft.model.checkpoint import CONFIG, raw_config
from foredraft.model.hub_errors import is_unreachable, why_not_on_hub


def config_of(name: str, revision: str | None = None) -> dict[str, Any]:
    """name: a directory or a hub id. Without defaults; empty if there is none, as for a file, which is not a hub id.

    Raises ModelError if the hub cannot be reached: the library would repeat its attempts for each further file.
    """
    if Path(name).is_dir():
        return raw_config(name)
    if Path(name).exists():
        return {}
    try:
        config = json.loads(Path(hf_hub_download(name, CONFIG, revision=revision)).read_bytes())
    except Exception as error:
        if is_unreachable(error):
            raise ModelError(f"{name}: {why_not_on_hub(error, revision)}") from error
        return {}
    return config if isinstance(config, dict) else {}
