"""Sources of the rows of a weight: memory, a file, or several weights joined.

A weight is packed block by block, so memory never holds all of it in a second form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kernels.weights import QuantizedWeight, Weight, WeightFormat, unquantized

GATED = 32
"""The block size in rows in which gates, and the values that they gate, alternate in a packed matrix."""

_BLOCK_UNIT = 2 * GATED
_NUMBERS_AT_A_TIME = 1 << 18


class WeightSource(Protocol):
    """A weight [n, k] whose rows can be read."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, first: int, end: int) -> Weight:
        """Rows first .. end - 1. All blocks have the same format."""


class InMemory:
    """weight: [n, k]. weight_format: converts each block of rows."""

    def __init__(self, weight: Weight, weight_format: WeightFormat = unquantized) -> None:
        self._weight, self._format = weight, weight_format
        self.shape = (int(weight.shape[0]), int(weight.shape[1]))

    def rows(self, first: int, end: int) -> Weight:
        if isinstance(self._weight, QuantizedWeight):
            return _of_each_row(lambda part: part[first:end], [self._weight])
        return self._format(self._weight[first:end])


class Joined:
    """Several weights with the same inputs, stacked by rows."""

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self._sources = list(sources)
        self._ends = list(accumulate(source.shape[0] for source in sources))
        self.shape = (self._ends[-1], sources[0].shape[1])

    def rows(self, first: int, end: int) -> Weight:
        parts = []
        for source, last in zip(self._sources, self._ends, strict=True):
            start = last - source.shape[0]
            parts.append(source.rows(*(min(max(row - start, 0), source.shape[0]) for row in (first, end))))
        return concatenated(parts)


class Interleaved:
    """32 rows of gate and 32 of up in turn, each weight padded with zero rows to a multiple of 32."""

    def __init__(self, gate: WeightSource, up: WeightSource) -> None:
        self._parts = (gate, up)
        self.shape = (2 * -(-gate.shape[0] // GATED) * GATED, gate.shape[1])

    def rows(self, first: int, end: int) -> Weight:
        """Raises ValueError unless first and end are multiples of 64."""
        if first % _BLOCK_UNIT or end % _BLOCK_UNIT:
            raise ValueError(
                f"rows of gates and values must be read in blocks of {_BLOCK_UNIT}, not from {first} to {end}"
            )
        blocks = []
        for part in self._parts:
            last = min(end // 2, part.shape[0])
            blocks.append(_padded(part.rows(min(first // 2, last), last), (end - first) // 2))
        return _of_each_row(_alternating, _unified(blocks))


class Alternating:
    """The rows of two weights of one shape in turn: the first row of each, then the second row of each, ..."""

    def __init__(self, first: WeightSource, second: WeightSource) -> None:
        self._parts = (first, second)
        self.shape = (2 * first.shape[0], first.shape[1])

    def rows(self, first: int, end: int) -> Weight:
        start, stop = first // 2, -(-end // 2)
        pairs = _unified([part.rows(start, stop) for part in self._parts])
        return _of_each_row(lambda a, b: _in_turn(a, b)[first - 2 * start : end - 2 * start], pairs)


class RowSlice:
    """Rows first, first + step, .. of a source, up to `end` (exclusive)."""

    def __init__(self, source: WeightSource, first: int, end: int, step: int = 1) -> None:
        self._source, self._first, self._step = source, first, step
        self.shape = (len(range(first, end, step)), source.shape[1])

    def rows(self, first: int, end: int) -> Weight:
        start = self._first + first * self._step
        between = self._source.rows(start, max(start, self._first + (end - 1) * self._step + 1))
        return _of_each_row(lambda part: part[:: self._step], [between])


class Reordered:
    """The rows of each attention head in another order. order: [D], the old index of each new row."""

    def __init__(self, source: WeightSource, order: Tensor) -> None:
        self._source, self._order = source, order
        self.shape = source.shape

    def rows(self, first: int, end: int) -> Weight:
        width = len(self._order)
        start, stop = first // width * width, -(-end // width) * width
        places = torch.arange(start, stop).view(-1, width)[:, self._order].flatten() - start
        whole_heads = self._source.rows(start, stop)
        return _of_each_row(lambda part: part[places[first - start : end - start]], [whole_heads])


def blocks_of(source: WeightSource) -> Iterator[tuple[int, Weight]]:
    """(first row, block) over the whole weight. Each block but the last has a multiple of 64 rows."""
    num_rows, width = source.shape
    step = max(1, _NUMBERS_AT_A_TIME // max(1, width) // _BLOCK_UNIT) * _BLOCK_UNIT
    for first in range(0, num_rows, step):
        yield first, source.rows(first, min(first + step, num_rows))


def read_all(source: WeightSource) -> Weight:
    """The whole weight at once."""
    return source.rows(0, source.shape[0])


def concatenated(weights: Sequence[Weight]) -> Weight:
    """Weights with the same inputs, stacked by rows, in a format that represents all of them exactly."""
    return _of_each_row(lambda *parts: torch.cat(parts), _unified(weights))


def _unified(weights: Sequence[Weight]) -> list[Weight]:
    """The weights, converted to one format without changing values. If some are unquantised, the others are dequantised."""
    if not all(isinstance(weight, QuantizedWeight) for weight in weights):
        return [weight.dequantized() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    group = gcd(*(weight.group for weight in quantized))
    has_offsets = any(weight.offsets is not None for weight in quantized)
    first = quantized[0]
    is_same = all(weight.bits == first.bits and _same(weight.levels, first.levels) for weight in quantized)
    bits, levels = (first.bits, first.levels) if is_same else (8, None)
    return [_converted(weight, group, has_offsets)._replace(bits=bits, levels=levels) for weight in quantized]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _converted(weight: QuantizedWeight, group: int, has_offsets: bool) -> QuantizedWeight:
    """The weight with smaller groups, and with offsets if has_offsets."""
    repeats = weight.group // group
    scales, offsets = weight.scales, weight.offsets
    if offsets is None and has_offsets:
        offsets = torch.zeros_like(scales)
    if repeats > 1:
        scales = scales.repeat_interleave(repeats, 1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, 1)
    return weight._replace(scales=scales, offsets=offsets, group=group)


def _of_each_row(change: Callable[..., Tensor], weights: Sequence[Weight]) -> Weight:
    """Apply `change` to the tensors that have a row for each output. All weights must have the same format."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if tensors:
        return change(*tensors)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    offsets = [weight.offsets for weight in quantized if weight.offsets is not None]
    return quantized[0]._replace(
        codes=change(*(weight.codes for weight in quantized)),
        scales=change(*(weight.scales for weight in quantized)),
        offsets=change(*offsets) if offsets else None,
    )


def _padded(weight: Weight, num_rows: int) -> Weight:
    """Append zero rows until there are num_rows."""
    missing = num_rows - weight.shape[0]
    pad = partial(torch.nn.functional.pad, pad=(0, 0, 0, missing))
    return _of_each_row(pad, [weight]) if missing else weight


def _in_turn(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], dim=1).flatten(0, 1)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    blocks = [part.reshape(-1, GATED, part.shape[1]) for part in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)
