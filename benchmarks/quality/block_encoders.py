"""Encoders for the GGUF types that the `gguf` package can only read: round to nearest, without llama.cpp's search for better scales.

Layouts: ggml's ggml-common.h. Every function takes the values of blocks, [N, 256] float32 ([N, 32] for IQ4_NL), and returns their bytes,
[N, size].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_LEAST = np.float32(1e-12)


def _half(x: Floats) -> tuple[Bytes, Floats]:
    """Numbers [N] as float16: their bytes [N, 2], and the rounded values [N]."""
    half = x.astype("<f2")
    return half[:, None].view(np.uint8), half.astype(np.float32)


def _steps(x: Floats, size: Floats, most: int) -> npt.NDArray[np.int32]:
    """x / size, rounded to the nearest integer from 0 to `most`."""
    return np.clip(np.rint(x / np.maximum(size, _LEAST)), 0, most).astype(np.int32)


def _with_minimums(blocks: Floats, most: int) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """For Q4_K and Q5_K: scales as bytes [N, 16], codes from 0 to `most` [N, 8, 32]."""
    groups = blocks.reshape(-1, 8, 32)
    minimums = -np.minimum(groups.min(-1), 0)
    scales = (groups.max(-1) + minimums) / most
    d_bytes, d = _half(scales.max(-1) / 63)
    m_bytes, d_min = _half(minimums.max(-1) / 63)
    s, m = _steps(scales, d[:, None], 63), _steps(minimums, d_min[:, None], 63)
    size, offset = (d[:, None] * s)[..., None], (d_min[:, None] * m)[..., None]
    low, middle = (part[:, :4] | part[:, 4:] >> 4 << 6 for part in (s, m))
    packed = np.concatenate([low, middle, (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4], 1).astype(np.uint8)
    return np.concatenate([d_bytes, m_bytes, packed], 1), _steps(groups + offset, size, most)


def _nibbles(codes: npt.NDArray[np.int32]) -> Bytes:
    """codes: [N, pairs, 2, width] -> [N, pairs * width], with the first of each pair in the low nibbles"""
    return (codes[:, :, 0] | codes[:, :, 1] << 4).astype(np.uint8).reshape(len(codes), -1)


def q4_k(blocks: Floats) -> Bytes:
    scales, codes = _with_minimums(blocks, 15)
    return np.concatenate([scales, _nibbles(codes.reshape(-1, 4, 2, 32))], 1)


def q5_k(blocks: Floats) -> Bytes:
    scales, codes = _with_minimums(blocks, 31)
    fifth = (codes >> 4 << np.arange(8)[:, None]).sum(1).astype(np.uint8)
    return np.concatenate([scales, fifth, _nibbles((codes & 15).reshape(-1, 4, 2, 32))], 1)


def q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(-1) / 31
    d_bytes, d = _half(scales.max(-1) / 127)
    s = _steps(scales, d[:, None], 127)
    codes = _steps(groups + 32 * (d[:, None] * s)[..., None], (d[:, None] * s)[..., None], 63).reshape(-1, 2, 4, 32)
    low = _nibbles((codes & 15).reshape(-1, 2, 2, 64))
    high = (codes >> 4 << np.arange(0, 8, 2)[:, None]).sum(2).astype(np.uint8).reshape(-1, 64)
    return np.concatenate([low, high, s.astype(np.uint8), d_bytes], 1)


def _nearest_levels(x: Floats, size: Floats) -> npt.NDArray[np.int32]:
    """The index of the level that is nearest to x / size, of the sixteen."""
    middles = (_LEVELS[1:] + _LEVELS[:-1]) / 2
    numbers = np.divide(x, size, out=np.zeros_like(x), where=np.broadcast_to(size != 0, x.shape))
    return np.searchsorted(middles, numbers).astype(np.int32)


def _signed_largest(groups: Floats) -> Floats:
    """[..., 32] -> the value with the largest magnitude, with its sign [...]"""
    places = np.abs(groups).argmax(-1)[..., None]
    largest: Floats = np.take_along_axis(groups, places, -1)[..., 0]
    return largest


def iq4_nl(blocks: Floats) -> Bytes:
    d_bytes, d = _half(_signed_largest(blocks) / _LEVELS[0])
    codes = _nearest_levels(blocks, d[:, None])
    return np.concatenate([d_bytes, _nibbles(codes.reshape(-1, 1, 2, 16))], 1)


def iq4_xs(blocks: Floats) -> Bytes:
    groups = blocks.reshape(-1, 8, 32)
    scales = _signed_largest(groups) / _LEVELS[0]
    d_bytes, d = _half(np.abs(scales).max(-1) / 31)
    s = np.rint(scales / np.maximum(d[:, None], _LEAST)).astype(np.int32)
    codes = _nearest_levels(groups, (d[:, None] * s)[..., None])
    s += 32
    shared = (s >> 4 << np.arange(0, 16, 2)).sum(1).astype("<u2")[:, None].view(np.uint8)
    low = (s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4).astype(np.uint8)
    return np.concatenate([d_bytes, shared, low, _nibbles(codes.reshape(-1, 8, 2, 16))], 1)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
}


def encode(array: Floats, kind: str) -> npt.NDArray[Any]:
    """Rows [n, k], with k a multiple of the type's block size -> the array that GGUFWriter takes for them."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind not in _ENCODERS:
        encoded: npt.NDArray[Any] = gguf.quants.quantize(array, type_)
        return encoded
    blocks = array.reshape(-1, gguf.GGML_QUANT_SIZES[type_][0])
    return _ENCODERS[kind](blocks).reshape(len(array), -1)
