"""What a pass is told, in memory that stays where it is: a graph reads it there whenever it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from foredraft.gpu.buckets import Bucket

NO_SPAN = -1
"""Of a row that fills up a bucket: it belongs to no sequence, stores nothing and reads nothing."""


class SpanPlace(NamedTuple):
    """Rows first_row .. of a pass belong to one sequence. stores: where its keys and its values [H, capacity, D] of each
    layer lie, [layers * 2]."""

    first_row: int
    num_rows: int
    capacity: int
    stores: Sequence[int]


class Inputs:
    """Of one bucket. ids, positions, row_spans: [rows]; wanted: [wanted]; capacities: [spans]; stores: [layers, spans, 2];
    all int64. temperatures: [spans] and uniforms [depth, spans] float64, of the tokens that the model goes on to."""

    def __init__(self, bucket: Bucket, num_layers: int, device: torch.device) -> None:
        self.bucket = bucket
        rows, spans = bucket.num_rows, bucket.num_spans
        sizes = [rows, rows, rows, bucket.num_wanted, spans, num_layers * spans * 2]
        self._num_layers = num_layers
        self._whole = _Twin(sum(sizes), torch.int64, device)
        self.ids, self.positions, self.row_spans, self.wanted, self.capacities, stores = torch.split(
            self._whole.device, sizes
        )
        self.row_spans.fill_(NO_SPAN)
        self.stores = stores.view(num_layers, spans, 2)
        self._noise = _Twin(spans * (1 + bucket.depth), torch.float64, device)
        self.temperatures = self._noise.device[:spans]
        self.uniforms = self._noise.device[spans:].view(bucket.depth, spans)

    def fill(
        self, ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int], spans: Sequence[SpanPlace]
    ) -> None:
        """One copy to the device. What the bucket has beyond this pass belongs to no sequence."""
        bucket = self.bucket
        spare_rows, spare_spans = bucket.num_rows - len(ids), bucket.num_spans - len(spans)
        row_spans = [NO_SPAN] * bucket.num_rows
        for index, span in enumerate(spans):
            row_spans[span.first_row : span.first_row + span.num_rows] = [index] * span.num_rows
        stores = (
            chain(
                *(span.stores[2 * layer : 2 * layer + 2] for span in spans),
                (0,) * 2 * spare_spans,
            )
            for layer in range(self._num_layers)
        )
        self._whole.fill(
            [
                *chain(ids, (0,) * spare_rows),
                *chain(positions, (0,) * spare_rows),
                *row_spans,
                *chain(wanted, (0,) * (bucket.num_wanted - len(wanted))),
                *chain((span.capacity for span in spans), (0,) * spare_spans),
                *chain.from_iterable(stores),
            ]
        )

    def fill_noise(self, temperatures: Sequence[float], uniforms: Sequence[Sequence[float]]) -> None:
        """temperatures: of each span, 0 for the likeliest. uniforms: of each span, one a token; fewer where it needs none."""
        spans, depth = self.bucket.num_spans, self.bucket.depth
        spare = (0.0,) * (spans - len(temperatures))
        by_step = (chain((own[step] if step < len(own) else 0.0 for own in uniforms), spare) for step in range(depth))
        self._noise.fill([*temperatures, *spare, *chain.from_iterable(by_step)])


class _Twin:
    """Numbers on the device and, where the device is another, their source in page-locked memory."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=dtype, device=device)
        is_apart = device.type == "cuda"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=is_apart)
        self._copied = torch.cuda.Event() if is_apart else None  # type: ignore[no-untyped-call]

    def fill(self, numbers: list[int] | list[float]) -> None:
        """Waits only until the copy before has been made: a prompt's pieces follow each other unread."""
        if self._copied is not None:
            self._copied.synchronize()
        self._host.numpy()[:] = numbers
        self.device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
