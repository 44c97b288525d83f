"""The `gguf` package reads encoded blocks back as the rounded numbers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from benchmarks.quality.block_encoders import encode

WIDEST_STEP = {
    "Q4_K": 2 / 15,
    "Q5_K": 2 / 31,
    "Q6_K": 2 / 62,
    "IQ4_NL": 25 / 127,
    "IQ4_XS": 25 / 127,
}
"""The distance between two numbers that a block can represent, relative to its largest."""


@pytest.mark.parametrize("kind", WIDEST_STEP)
def test_numbers_are_read_back_within_half_a_step(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    x[1] *= 0.1
    x[2, :256] = 0
    read = gguf.quants.dequantize(encode(x, kind), gguf.GGMLQuantizationType[kind]).reshape(6, 2, 256)
    blocks = x.reshape(6, 2, 256)
    largest = np.abs(blocks).max(-1, keepdims=True)
    # a fifth of a step: scales are rounded too
    assert (np.abs(read - blocks) <= 0.7 * WIDEST_STEP[kind] * largest).all()
    scale = np.sqrt((blocks**2).mean())
    assert np.sqrt(((read - blocks) ** 2).mean()) < WIDEST_STEP[kind] * scale
