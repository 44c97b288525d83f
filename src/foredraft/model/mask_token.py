"""The mask token of a draft model that writes several tokens in one pass (PARD, arXiv:2504.18583): its places hold this id until
they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MASK_TOKEN = "pard_token"
"""The key of config.json, as published models have it."""

_KEYS = (MASK_TOKEN, "ptd_token_id")


def mask_token_of(config: Mapping[str, Any]) -> int | None:
    """config: of config.json. None: the model was not trained with mask tokens."""
    found = next((config[key] for key in _KEYS if key in config), None)
    return found if isinstance(found, int) and found >= 0 else None
