"""A draft model without an encoder: its decoder attends to the output of the target's encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.engine.sources import SourceKeys
from foredraft.model.encoder_decoder import EncoderDecoderBody
from foredraft.model.source_attention import encoded_rows

_KEY, _KIND = "spd_type", "shared_encoder"
MARK: Mapping[str, Any] = {_KEY: _KIND}
"""The entry of config.json that marks such a model."""


def shares_encoder(config: Mapping[str, Any]) -> bool:
    """config: the contents of config.json."""
    return config.get(_KEY) == _KIND


class SharedEncoderBody(EncoderDecoderBody):
    """A body whose encoder is never run."""

    def read_sources(self, sources: Sequence[SourceKeys]) -> None:
        """Fill in the keys and values of these sources from the output of the target's encoder, which is then dropped unless it is to be
        kept."""
        self.project(sources, encoded_rows(sources))
