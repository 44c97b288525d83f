"""A draft model without an encoder: its decoder attends to what the target's encoder gave of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.engine.sources import SourceKeys
from foredraft.model.encoder_decoder import EncoderDecoderBody
from foredraft.model.source_attention import encoded_rows

_KEY, _KIND = "spd_type", "shared_encoder"
MARK: Mapping[str, Any] = {_KEY: _KIND}
"""What says so in config.json."""


def shares_encoder(config: Mapping[str, Any]) -> bool:
    """config: of config.json."""
    return config.get(_KEY) == _KIND


class SharedEncoderBody(EncoderDecoderBody):
    """Its encoder is never run."""

    def read_sources(self, sources: Sequence[SourceKeys]) -> None:
        """Fill in their keys and values, from what they bring of the target's encoder. That is let go of."""
        self.project(sources, encoded_rows(sources))
