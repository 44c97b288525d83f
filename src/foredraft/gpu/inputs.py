"""The inputs of a pass at fixed addresses, where a graph reads them whenever it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.gpu.buckets import Bucket, Noise
from foredraft.kernels import DrawSpec, StackBatch

NO_SPAN = -1
"""The span of a padding row: it belongs to no sequence, stores nothing and reads nothing."""

BY_KEY = -1.0
"""In place of a uniform number if the token is chosen with shared noise."""


class SlotPaths(NamedTuple):
    """The slots that a row sees from its span's start on. slots: all paths, one after the other; rows on the same path share it.
    first_slots: [R], the index in slots at which each row's path begins."""

    slots: Sequence[int]
    first_slots: Sequence[int]


class Inputs:
    """The inputs for one bucket. ids, positions, row_spans: [rows]; wanted: [wanted]; capacities: [spans]; stores: [layers, spans, 2];
    chosen: [1], the address of the tokens that placeholders among the ids stand for; all int64. temperatures: [spans] and uniforms:
    [depth, spans], float64, for generated tokens; a uniform is BY_KEY if noise is shared. keys: [depth, spans] int64, of the shared
    noise, or None if the bucket has none. slots and first_slots: [rows], starts: [spans], path_slots: [slots], all int64 (SlotPaths), or
    None if the bucket is contiguous."""

    def __init__(self, bucket: Bucket, num_layers: int, device: torch.device) -> None:
        self.bucket = bucket
        rows, spans = bucket.num_rows, bucket.num_spans
        sizes = [rows, rows, rows, bucket.num_wanted, spans, num_layers * spans * 2, 1]
        self._whole = PinnedBuffer(sizes, torch.int64, device)
        self.ids, self.positions, self.row_spans, self.wanted, self.capacities, stores, self.chosen = (
            self._whole.device_parts(sizes)
        )
        self.stores = stores.view(num_layers, spans, 2)
        self._parts = self._whole.host_parts(sizes)
        noise_sizes = [spans, spans * bucket.depth]
        self._noise = PinnedBuffer(noise_sizes, torch.float64, device)
        self.temperatures, uniforms = self._noise.device_parts(noise_sizes)
        self.uniforms = uniforms.view(bucket.depth, spans)
        self._noise_parts = self._noise.host_parts(noise_sizes)
        self._buffers = [self._whole]
        if bucket.noise:
            self._buffers.append(self._noise)
        self.keys: Tensor | None = None
        if bucket.noise == Noise.SHARED:
            self._shared = PinnedBuffer(noise_sizes[1:], torch.int64, device)
            self._buffers.append(self._shared)
            self.keys = self._shared.device_parts(noise_sizes[1:])[0].view(bucket.depth, spans)
            self._key_part = self._shared.host_parts(noise_sizes[1:])[0]
        self.slots: Tensor | None = None
        self.starts: Tensor | None = None
        self.first_slots: Tensor | None = None
        self.path_slots: Tensor | None = None
        if not bucket.is_contiguous:
            slot_sizes = [rows, spans, rows, bucket.num_slots]
            self._slots = PinnedBuffer(slot_sizes, torch.int64, device)
            self._buffers.append(self._slots)
            self.slots, self.starts, self.first_slots, self.path_slots = self._slots.device_parts(slot_sizes)
            self._slot_parts = self._slots.host_parts(slot_sizes)
        self._sent = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.clear()
        self.send()

    def send(self) -> None:
        """Copy what was filled in to the device, as part of a graph."""
        for buffer in self._buffers:
            buffer.send()

    def record(self) -> None:
        """Let `fill` wait for the copies that are under way now."""
        if self._sent is not None:
            self._sent.record()

    def clear(self) -> None:
        """Make all of the bucket padding, so that a pass touches no sequence's memory."""
        self.fill(StackBatch([], [], None if self.bucket.is_contiguous else [], [], []), SlotPaths([], []))

    def fill(self, batch: StackBatch, paths: SlotPaths | None = None, chosen: Tensor | None = None) -> None:
        """Let the next `send` copy this batch. The rest of the bucket becomes padding. paths: needed if slots are not positions. chosen:
        needed if there are placeholders; contiguous and int64, on the device"""
        if self._sent is not None:
            self._sent.synchronize()  # the chunks of a prompt follow each other without a result being read
        ids, positions, row_spans, wanted, capacities, stores, address = self._parts
        for part, numbers in ((ids, batch.ids), (positions, batch.positions), (wanted, batch.wanted)):
            part[: len(numbers)] = numbers
            part[len(numbers) :] = 0
        row_spans[:] = NO_SPAN
        capacities[:] = 0
        by_span = stores.reshape(-1, self.bucket.num_spans, 2)
        for index, span in enumerate(batch.spans):
            row_spans[span.first_row : span.first_row + span.num_rows] = index
            capacities[index] = span.capacity
            by_span[:, index] = np.asarray(span.stores).reshape(-1, 2)
        by_span[:, len(batch.spans) :] = 0
        address[0] = 0 if chosen is None else chosen.data_ptr()
        if batch.slots is not None:
            assert paths is not None
            self._fill_slots(batch, batch.slots, paths)

    def _fill_slots(self, batch: StackBatch, slots: Sequence[int], paths: SlotPaths) -> None:
        row_slots, starts, first_slots, path_slots = self._slot_parts
        for part in self._slot_parts:
            part[:] = 0
        row_slots[: len(slots)] = slots
        starts[: len(batch.spans)] = [span.start for span in batch.spans]
        first_slots[: len(paths.first_slots)] = paths.first_slots
        path_slots[: len(paths.slots)] = paths.slots

    def fill_noise(self, specs: Sequence[DrawSpec]) -> None:
        """After `fill`. specs: one per span, with noise for every token that it generates."""
        temperatures, uniforms = self._noise_parts
        temperatures[:], uniforms[:] = 0.0, 0.0
        by_step = self._by_step(uniforms)
        for index, spec in enumerate(specs):
            temperatures[index] = spec.temperature
            by_step[: len(spec.uniforms), index] = spec.uniforms
            by_step[: len(spec.keys), index] = BY_KEY
        if self.keys is not None:
            self._fill_keys(specs)

    def _fill_keys(self, specs: Sequence[DrawSpec]) -> None:
        self._key_part[:] = 0
        by_step = self._by_step(self._key_part)
        for index, spec in enumerate(specs):
            by_step[: len(spec.keys), index] = spec.keys

    def _by_step(self, part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A view of the same memory, [depth, spans]."""
        return part.reshape(self.bucket.depth, self.bucket.num_spans)


class PinnedBuffer:
    """Numbers on the device and the host memory that they are copied from, page-locked if the device is a GPU."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device) -> None:
        size = sum(_even(sizes))
        self._device = torch.zeros(size, dtype=dtype, device=device)
        is_apart = device.type == "cuda"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=is_apart)

    def device_parts(self, sizes: list[int]) -> tuple[Tensor, ...]:
        parts = torch.split(self._device, _even(sizes))
        return tuple(part[:size] for part, size in zip(parts, sizes, strict=True))

    def host_parts(self, sizes: list[int]) -> list[np.ndarray[Any, Any]]:
        """`send` copies what is written to these to the device."""
        parts = np.split(self._host.numpy(), np.cumsum(_even(sizes))[:-1])
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def send(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


def _even(sizes: list[int]) -> list[int]:
    """Align each part to 16 bytes: kernels are compiled separately for parts that are not."""
    return [size + size % 2 for size in sizes]
