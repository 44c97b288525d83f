"""Blocks are decoded as by `gguf.quants`, whatever bytes they contain."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.model.gguf.blocks import BLOCK_TYPES, decode
from tests.model.gguf.writing import random_blocks

REASSOCIATED = ("Q4_1", "Q4_K")
"""Types whose codes have 8 subtracted, and whose offsets include 8 steps."""


def expected(kind: str, rows: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def random_rows(kind: str, seed: int, num_rows: int, num_blocks: int) -> np.ndarray:
    """Rows of random bytes; scales may be infinite, NaN or far apart."""
    size = num_blocks * BLOCK_TYPES[kind].size
    return np.random.default_rng(seed).integers(0, 256, (num_rows, size), dtype=np.uint8)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), num_rows=st.integers(1, 5), num_blocks=st.integers(1, 4))
def test_any_bytes_are_decoded_as_the_reference_does(kind: str, seed: int, num_rows: int, num_blocks: int) -> None:
    rows = random_rows(kind, seed, num_rows, num_blocks)
    theirs, weight = expected(kind, rows), decode(kind, rows)
    ours = weight.dequantized().numpy()
    if kind not in REASSOCIATED:
        np.testing.assert_array_equal(ours, theirs)
        return
    scales = weight.scales.repeat_interleave(weight.group, 1).abs().numpy()
    sound = np.isfinite(theirs) & np.isfinite(ours)
    largest = np.abs(np.where(sound, theirs, 0)) + 16 * np.where(sound, scales, 0)
    np.testing.assert_array_less(
        np.abs(np.where(sound, ours - theirs, 0)), np.spacing(largest.astype(np.float32)) * 1.01
    )


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_weights_of_a_layer_are_decoded_bit_for_bit(kind: str) -> None:
    like = np.random.default_rng(0).normal(size=(64, 1024)).astype(np.float32) / 32
    type_ = gguf.GGMLQuantizationType[kind]
    try:
        rows = gguf.quants.quantize(like, type_)
    except NotImplementedError:
        rows = random_blocks(kind, like)
    np.testing.assert_array_equal(decode(kind, rows).dequantized().numpy(), expected(kind, rows))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_codes_fit_their_number_of_bits(kind: str) -> None:
    weight = decode(kind, random_rows(kind, 0, 32, 8))
    assert weight.codes.dtype == torch.int8
    assert weight.scales.shape == (32, weight.shape[1] // weight.group)
    codes = set(weight.codes.flatten().tolist())
    if weight.levels is not None:
        assert weight.levels.tolist() == sorted(weight.levels.tolist())
        assert len(weight.levels) == 16
        assert codes == set(weight.levels.tolist())
    elif weight.bits == 4:
        assert codes == set(range(-8, 8))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind, block_type in BLOCK_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1] == block_type.size
