"""Convert GGUF's blocks of quantized numbers to codes, scales and offsets.

Layouts: ggml's ggml-common.h and ggml-quants.c; `gguf.quants` is the reference of the tests. All fields are little-endian. A block is
never dequantized here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foredraft.kernels import QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Floats = npt.NDArray[np.float32]

_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Doubled, so that they are integers."""

_MANTISSA_BITS = 23
_SUBNORMAL = 1 << 21
_FOUR = np.uint8(4)
_SMALL = 8
"""Half of a nibble's range: unsigned nibbles minus this are -8 .. 7."""


class Decoded(NamedTuple):
    """For blocks [n, b, size]: codes [n, b, values]; scales and offsets [n, b, groups]."""

    codes: Codes
    scales: Floats
    offsets: Floats | None = None


def _float16(blocks: Bytes, first: int) -> Floats:
    """The number at this byte of each block: [n, b, 1]"""
    field = np.ascontiguousarray(blocks[..., first : first + 2])
    return field.view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., m] -> [..., 2 m]: first the low nibbles, then the high ones"""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _nibbles_in_runs(packed: Bytes, run: int) -> Bytes:
    """The same within each run of `run` bytes."""
    *outer, size = packed.shape
    parts = packed.reshape(*outer, size // run, run)
    return _nibbles(parts).reshape(*outer, 2 * size)


def _high_bits(packed: Bytes) -> Bytes:
    """[..., 4] bytes -> [..., 32], each bit as the fifth bit of a value"""
    return np.unpackbits(packed, axis=-1, bitorder="little") << _FOUR


def _signed(codes: Bytes, zero: int) -> Codes:
    return (codes - np.uint8(zero)).view(np.int8)


def _q8_0(blocks: Bytes) -> Decoded:
    return Decoded(blocks[..., 2:].view(np.int8), _float16(blocks, 0))


def _q4_0(blocks: Bytes) -> Decoded:
    return Decoded(_signed(_nibbles(blocks[..., 2:]), _SMALL), _float16(blocks, 0))


def _q4_1(blocks: Bytes) -> Decoded:
    d, m = _float16(blocks, 0), _float16(blocks, 2)
    return Decoded(_signed(_nibbles(blocks[..., 4:]), _SMALL), d, m + _SMALL * d)


def _q5_0(blocks: Bytes) -> Decoded:
    codes = _nibbles(blocks[..., 6:]) | _high_bits(blocks[..., 2:6])
    return Decoded(_signed(codes, 16), _float16(blocks, 0))


def _q5_1(blocks: Bytes) -> Decoded:
    codes = _nibbles(blocks[..., 8:]) | _high_bits(blocks[..., 4:8])
    return Decoded(_signed(codes, 0), _float16(blocks, 0), _float16(blocks, 2))


def _six_bit_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[..., 12] -> scales and minimums of 8 groups, [..., 8] each, six bits"""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scales, minimums


def _with_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the blocks of Q4_K and Q5_K."""
    scales, minimums = _six_bit_scales(blocks[..., 4:16])
    d, d_min = _float16(blocks, 0), _float16(blocks, 2)
    return d * scales.astype(np.float32), -(d_min * minimums.astype(np.float32))


def _q4_k(blocks: Bytes) -> Decoded:
    scales, offsets = _with_minimums(blocks)
    codes = _nibbles_in_runs(blocks[..., 16:], 32)
    return Decoded(_signed(codes, _SMALL), scales, offsets + _SMALL * scales)


def _q5_k(blocks: Bytes) -> Decoded:
    scales, offsets = _with_minimums(blocks)
    # bit g of byte l is the fifth bit of value l of group g
    fifth = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2) << _FOUR
    codes = _nibbles_in_runs(blocks[..., 48:], 32) | fifth.reshape(*blocks.shape[:-1], 256)
    return Decoded(_signed(codes, 0), scales, offsets)


def _q6_k(blocks: Bytes) -> Decoded:
    low = _nibbles_in_runs(blocks[..., :128], 64)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (pairs >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    codes = low | (high.reshape(*blocks.shape[:-1], 256) << _FOUR)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32)
    return Decoded(_signed(codes, 32), _float16(blocks, 208) * scales)


def _iq4_nl(blocks: Bytes) -> Decoded:
    levels = np.array(_IQ4_LEVELS, np.int8)
    return Decoded(levels[_nibbles(blocks[..., 2:])], _float16(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Decoded:
    """The scales of 8 groups have six bits: the lower four in a nibble, the upper two in 16 bits shared by all groups."""
    shared = np.ascontiguousarray(blocks[..., 2:4]).view("<u2")
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:-1], 8)
    high = (shared >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (low | (high << 4)).astype(np.float32) - 32
    levels = np.array(_IQ4_LEVELS, np.int8)
    return Decoded(levels[_nibbles_in_runs(blocks[..., 8:], 16)], _float16(blocks, 0) * scales)


def _mxfp4(blocks: Bytes) -> Decoded:
    """A scale is 2 ** (first byte - 127), halved because the levels are doubled."""
    exponents = blocks[..., :1].astype(np.uint32)
    bits = np.where(exponents < 2, _SUBNORMAL << exponents, (np.maximum(exponents, 2) - 1) << _MANTISSA_BITS)
    levels = np.array(_MXFP4_LEVELS, np.int8)
    return Decoded(levels[_nibbles(blocks[..., 1:])], bits.astype(np.uint32).view(np.float32))


class BlockType(NamedTuple):
    """size: bytes of a block. group: how many values share a scale. bits, levels: as in QuantizedWeight."""

    decode: Callable[[Bytes], Decoded]
    size: int
    group: int
    bits: int
    levels: tuple[int, ...] | None = None


BLOCK_TYPES = {
    "Q8_0": BlockType(_q8_0, 34, 32, 8),
    "Q4_0": BlockType(_q4_0, 18, 32, 4),
    "Q4_1": BlockType(_q4_1, 20, 32, 4),
    "Q5_0": BlockType(_q5_0, 22, 32, 8),
    "Q5_1": BlockType(_q5_1, 24, 32, 8),
    "Q4_K": BlockType(_q4_k, 144, 32, 4),
    "Q5_K": BlockType(_q5_k, 176, 32, 8),
    "Q6_K": BlockType(_q6_k, 210, 16, 8),
    "IQ4_NL": BlockType(_iq4_nl, 18, 32, 4, _IQ4_LEVELS),
    "IQ4_XS": BlockType(_iq4_xs, 136, 32, 4, _IQ4_LEVELS),
    "MXFP4": BlockType(_mxfp4, 17, 32, 4, tuple(sorted(_MXFP4_LEVELS))),
}

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode(kind: str, rows: Bytes) -> QuantizedWeight:
    """rows: [n, bytes of a row] in blocks of this type -> n rows of the weight. Scales may be infinite or NaN."""
    block_type = BLOCK_TYPES[kind]
    blocks = np.ascontiguousarray(rows).reshape(len(rows), rows.shape[1] // block_type.size, block_type.size)
    with np.errstate(all="ignore"):  # the caller checks that scales are finite
        decoded = block_type.decode(blocks)
    return QuantizedWeight(
        _of_rows(decoded.codes),
        _of_rows(decoded.scales),
        None if decoded.offsets is None else _of_rows(decoded.offsets),
        block_type.group,
        block_type.bits,
        None if block_type.levels is None else torch.tensor(block_type.levels, dtype=torch.int8),
    )


def _of_rows(array: npt.NDArray[Any]) -> Tensor:
    """[n, b, m] -> [n, b m]"""
    n, b, m = array.shape
    return torch.from_numpy(np.ascontiguousarray(array).reshape(n, b * m))
