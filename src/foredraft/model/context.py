"""The longest sequence that a model can read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

logger = logging.getLogger("foredraft")

_DEFAULT_CONTEXT = 2048
_GROWING_ROPES = ("dynamic", "longrope")


def context_len_of(config: PretrainedConfig, name: str) -> int:
    """The longest sequence to read. If the rotary embedding changes with the longest position of a pass, the context ends where that
    begins: beyond, one request would change the rotation of its neighbours, and cached keys would be stale."""
    text: Any = config.get_text_config()
    stated = (getattr(text, field, None) for field in _length_fields())
    longest = next((int(value) for value in stated if value), _DEFAULT_CONTEXT)
    if hasattr(text, "relative_attention_max_distance"):
        longest = _DEFAULT_CONTEXT  # all far distances are alike: T5's n_positions is just its training length
    for rope in _ropes(getattr(text, "rope_parameters", None) or {}):
        if rope.get("rope_type", rope.get("type")) in _GROWING_ROPES:
            fixed = rope.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            limit = int(fixed or longest)
            if limit <= longest:
                logger.warning(
                    "%s: its rotary embedding (%s) changes after %d positions, so the context ends there",
                    name,
                    rope.get("rope_type"),
                    limit,
                )
            longest = min(longest, limit)
    return longest


def _length_fields() -> Sequence[str]:
    return (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "seq_length",
        "max_seq_len",
        "max_target_positions",
    )


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """One set of parameters, or one per layer type."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return [value for value in parameters.values() if isinstance(value, dict)]
    return [parameters]
