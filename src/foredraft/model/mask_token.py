"""The mask token of a draft model that writes several tokens in one pass (PARD, arXiv:2504.18583): it fills the positions that are not
written yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MASK_TOKEN = "pard_token"
"""Its key in the config.json of published models."""

_KEYS = (MASK_TOKEN, "ptd_token_id")


def mask_token_of(config: Mapping[str, Any]) -> int | None:
    """config: the contents of config.json. None: the model was not trained with mask tokens."""
    found = next((config[key] for key in _KEYS if key in config), None)
    return found if isinstance(found, int) and found >= 0 else None
