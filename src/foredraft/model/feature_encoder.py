"""An encoder-decoder whose encoder reads features (Whisper)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.engine.sources import SourceKeys
from foredraft.kernels import Kernels
from foredraft.model.encoder_decoder import EncoderDecoderBody
from foredraft.model.encoder_inputs import FeatureInputs
from foredraft.model.source_attention import EncoderMetadata


class FeatureEncoderBody(EncoderDecoderBody):
    """See EncoderDecoderBody."""

    def __init__(self, hf: PreTrainedModel, kernels: Kernels | None = None) -> None:
        super().__init__(hf, kernels)
        self._inputs = FeatureInputs(hf)

    def _encode(self, sources: Sequence[SourceKeys]) -> Tensor:
        """One source at a time: each has more than a thousand rows, and nothing to gain from batching."""
        with self._routed():
            return torch.cat([self._encode_alone(keys) for keys in sources])

    def _encode_alone(self, keys: SourceKeys) -> Tensor:
        metadata = EncoderMetadata([keys], 0, self._encoder_biases, self.kernels)
        arguments = self._inputs.arguments(keys.source)
        rows: Tensor = self._encoder(**arguments, attention_metadata=metadata).last_hidden_state[0]
        return rows
