"""What methods need besides the target, and the error if it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from foredraft.errors import ForedraftError

_DRAFT = "give its directory or hub id as draft_model (--draft-model)"

REQUIREMENTS: Mapping[str, str] = MappingProxyType(
    {
        "draft_model": f"a draft model: {_DRAFT}",
        "eagle": f"an EAGLE head: {_DRAFT}",
        "medusa": "Medusa heads: give their directory or hub id as draft_model (--draft-model)",
        "dflash": f"a DFlash head: {_DRAFT}",
        "peagle": f"a P-EAGLE head: {_DRAFT}",
        "pard": "a draft model with mask tokens: give one whose config.json has pard_token as draft_model (--draft-model)",
        "early_exit": "a layer: give exit_layer (--exit-layer), or the directory of a trained exit as draft_model (--draft-model)",
        "remote": "a draft server: give draft_server (--draft-server)",
    }
)
"""By method: what it needs, and how to give it."""


def missing_for(method: str) -> ForedraftError:
    """The error for a method whose requirement is missing, or is of another kind."""
    return ForedraftError(f'method "{method}" needs {REQUIREMENTS[method]}')
