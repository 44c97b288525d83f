"""Tensors of a GGUF file: as sources of rows for the kernels, or in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foredraft.errors import ModelError
from foredraft.kernels import QuantizedWeight, Weight, blocks_of, dequantized
from foredraft.model.gguf.blocks import BLOCK_TYPES, FLOAT_TYPES, decode
from foredraft.model.gguf.container import GGUFFile, TensorEntry

Order = npt.NDArray[np.int64]


class GGUFRows:
    """A tensor's rows, decoded from the mapped file when they are read. Leading dimensions (experts) are flattened.

    order: which row of the file each row is; None for the file's own order. Raises ModelError for a type that is not supported.
    """

    def __init__(self, file: GGUFFile, entry: TensorEntry, order: Order | None = None) -> None:
        refuse_unsupported_type(file, entry)
        self._file, self._entry, self._order = file, entry, order
        self._bytes = file.rows(entry)
        self.shape = (self._bytes.shape[0], entry.shape[-1])

    def rows(self, first: int, end: int) -> Weight:
        """Raises ModelError for scales that are infinite or NaN."""
        chosen = self._bytes[first:end] if self._order is None else self._bytes[self._order[first:end]]
        weight = self._decoded(chosen)
        width = self._bytes.shape[1]
        # rows are only reordered within a head: pages that are dropped too early are read again
        self._file.forget_pages(self._entry, first * width, end * width)
        return weight

    def _decoded(self, rows: npt.NDArray[np.uint8]) -> Weight:
        if self._entry.kind in FLOAT_TYPES:
            return _floats(rows, FLOAT_TYPES[self._entry.kind])
        weight = decode(self._entry.kind, rows)
        if not _is_finite(weight):
            raise ModelError(
                f"{self._file.path}: its tensor {self._entry.name!r} contains NaN or infinity; download it again, or use another"
            )
        return weight


def refuse_unsupported_type(file: GGUFFile, entry: TensorEntry) -> None:
    """Raise ModelError, with the types that can be read."""
    if entry.kind not in BLOCK_TYPES and entry.kind not in FLOAT_TYPES:
        known = ", ".join([*FLOAT_TYPES, *BLOCK_TYPES])
        raise ModelError(f"{file.path}: its tensor {entry.name!r} is of type {entry.kind}; {known} can be read")


def is_float(entry: TensorEntry) -> bool:
    return entry.kind in FLOAT_TYPES


def read_floats(file: GGUFFile, entry: TensorEntry, order: Order | None = None) -> Tensor:
    """The whole tensor in its own floating dtype (float32 if it is quantized), a view of the file where possible."""
    source = GGUFRows(file, entry, order)
    if not is_float(entry):
        return torch.cat([dequantized(block) for _, block in blocks_of(source)]).view(entry.shape)
    whole = _floats(file.rows(entry), FLOAT_TYPES[entry.kind]).view(entry.shape)
    return whole if order is None else whole[torch.from_numpy(order)]


def _floats(rows: npt.NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """[n, bytes] -> [n, values]"""
    return torch.from_numpy(rows).view(dtype)


def _is_finite(weight: QuantizedWeight) -> bool:
    parts: list[Any] = [weight.scales, weight.offsets]
    return all(part is None or bool(torch.isfinite(part.sum(dtype=torch.float64))) for part in parts)


def order_of_heads(num_rows: int, num_heads: int) -> Order:
    """Where the rows of q or k are that llama.cpp's converter permuted: it rotates the pairs (2 i, 2 i + 1) of each head together, and we
    rotate (i, i + D / 2)."""
    half = num_rows // num_heads // 2
    pairs = np.arange(num_rows, dtype=np.int64).reshape(num_heads, half, 2)
    return pairs.swapaxes(1, 2).reshape(-1)
