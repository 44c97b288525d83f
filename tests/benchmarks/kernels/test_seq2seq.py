"""The floor of a pass counts the matrices that it reads."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from benchmarks.kernels.seq2seq import decoder_weights, random_t5

WIDTH, LAYERS, VOCABULARY = 128, 2, 8192


def test_counted_weights_are_those_that_every_decoder_pass_reads() -> None:
    with torch.device("meta"):
        hf: PreTrainedModel = random_t5(WIDTH, LAYERS)
    mlp = hf.config.d_ff * WIDTH * 3
    attention = 4 * WIDTH**2 + 2 * WIDTH**2  # self-attention, and the queries and output of cross-attention
    assert decoder_weights(hf) == LAYERS * (mlp + attention) + VOCABULARY * WIDTH
