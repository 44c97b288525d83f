"""The speed of prefill against its floor: its multiplications over the processor's peak, measured in the same run.

    python -m benchmarks.kernels.prompt_reading [--before DIR] [--lens 128 512 2048 4096] [--precisions bfloat16 int8]
    python -m benchmarks.kernels.prompt_reading --batches 1 16 32 --lens 64 --last 1

A random model of SmolLM2-135M's shape reads a prompt in chunks, as in the engine. With --last only the last rows of each
sequence are timed, with the rest in the cache: 1 is a decoding step, 5 a verification. --before is the folder of another
version of foredraft/kernels with the same structs: both libraries take turns. Attention and products are timed in separate
calls with the same shapes; the rest is the difference. On one thread processor time is measured, so that other programs
disturb it less. Medians.
"""

from __future__ import annotations

import argparse
import statistics
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from benchmarks.kernels.limits import Peak, timed
from foredraft.kernels import (
    AttentionShape,
    AttentionSpan,
    CacheSpan,
    Kernels,
    NormWeights,
    PackedMatrix,
    Stack,
    StackBatch,
    StackForm,
    StackLayer,
    StackMlp,
    build,
    quantize_int4,
    quantize_int8,
    unquantized,
)
from foredraft.kernels.start import usable_instructions

_LAYERS, _HIDDEN, _INTERMEDIATE, _VOCABULARY = 30, 576, 1536, 49_152
_HEADS, _KV_HEADS, _HEAD_DIM = 9, 3, 64
_SHAPES = (
    ((_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, _HIDDEN),
    (_HIDDEN, _HEADS * _HEAD_DIM),
    (2 * _INTERMEDIATE, _HIDDEN),
    (_HIDDEN, _INTERMEDIATE),
)
_FORMATS = {"bfloat16": unquantized, "int8": quantize_int8, "int4": quantize_int4}
_CHUNK = 512


class Split(NamedTuple):
    """Seconds of the whole, and of its parts timed separately."""

    whole: float
    attention: float
    products: float


class Reader:
    """One library's copy of the model."""

    def __init__(self, name: str, kernels: Kernels, precision: str) -> None:
        self.name, self.kernels, self.precision = name, kernels, precision
        generator = torch.Generator().manual_seed(0)

        def packed(n: int, k: int) -> PackedMatrix:
            return kernels.pack(_FORMATS[precision](torch.randn(n, k, generator=generator) / k**0.5))

        norm, none = NormWeights(torch.ones(_HIDDEN)), NormWeights()
        self.matrices = [[packed(n, k) for n, k in _SHAPES] for _ in range(_LAYERS)]
        layers = [
            StackLayer(norm, norm, none, none, None, None, qkv, out, [StackMlp(up, down)])
            for qkv, out, up, down in self.matrices
        ]
        self.head = packed(_VOCABULARY, _HIDDEN)
        embedding = torch.randn(_VOCABULARY, _HIDDEN, generator=generator).to(torch.bfloat16)
        form = StackForm(_HEADS, _KV_HEADS, _HEAD_DIM, _HEAD_DIM, epsilon=1e-5, scale=_HEAD_DIM**-0.5)
        self.stack = Stack(layers, embedding, norm, self.head, form)


class Prompt:
    """Sequences of one length, and their cache."""

    def __init__(self, num_sequences: int, length: int, last: int) -> None:
        self.num_sequences, self.length, self.last = num_sequences, length, last
        self.capacity = -(-length // 16) * 16
        shape = (num_sequences, _LAYERS, 2, _KV_HEADS, self.capacity, _HEAD_DIM)
        self.store = torch.zeros(shape, dtype=torch.bfloat16)
        angles = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(_HEAD_DIM // 2) / (_HEAD_DIM / 2))
        self.rotation = (angles.cos()[None].contiguous(), angles.sin()[None].contiguous())
        self.ids = torch.randint(_VOCABULARY, (num_sequences, length), generator=torch.Generator().manual_seed(1))

    def chunks(self) -> Iterator[tuple[int, int]]:
        first = self.length - self.last if self.last else 0
        while first < self.length:
            end = min(first + _CHUNK, self.length)
            yield first, end
            first = end

    def batch(self, first: int, end: int) -> StackBatch:
        count = end - first
        spans = [
            CacheSpan(i * count, count, first, self.capacity, array("q", self.addresses(i)))
            for i in range(self.num_sequences)
        ]
        ids = self.ids[:, first:end].flatten().tolist()
        positions = list(range(first, end)) * self.num_sequences
        wanted = [(i + 1) * count - 1 for i in range(self.num_sequences)] if end == self.length else []
        return StackBatch(ids, positions, None, wanted, spans)

    def addresses(self, sequence: int) -> list[int]:
        return [part.data_ptr() for layer in self.store[sequence] for part in layer]

    def read(self, reader: Reader) -> None:
        for first, end in self.chunks():
            reader.kernels.read(reader.stack, self.batch(first, end), self.rotation)

    def attend(self, reader: Reader) -> None:
        shape = AttentionShape(_HEAD_DIM**-0.5)
        for first, end in self.chunks():
            count, padded = end - first, -(-end // 16) * 16
            query = torch.ones(_HEADS, count * self.num_sequences, _HEAD_DIM, dtype=torch.bfloat16)
            for layer in range(_LAYERS):
                spans = []
                for i in range(self.num_sequences):
                    keys, values = self.store[i, layer, :, :, :padded]
                    spans.append(AttentionSpan(slice(i * count, (i + 1) * count), first, keys, values))
                reader.kernels.attend(spans, query, shape, query.shape[1])

    def multiply(self, reader: Reader) -> None:
        for first, end in self.chunks():
            rows = (end - first) * self.num_sequences
            inputs = {k: torch.ones(rows, k, dtype=torch.bfloat16) for _, k in _SHAPES}
            for matrix in chain.from_iterable(reader.matrices):
                reader.kernels.linear(matrix, inputs[matrix.in_features])
        reader.kernels.linear(reader.head, inputs[_HIDDEN][: self.num_sequences])

    def split(self, reader: Reader) -> Split:
        return Split(*(timed(lambda part=part: part(reader)) for part in (self.read, self.attend, self.multiply)))  # type: ignore[misc]

    def product_pairs(self) -> int:
        """The number of multiplications by weights."""
        rows = sum(end - first for first, end in self.chunks())
        return self.num_sequences * (rows * _LAYERS * sum(n * k for n, k in _SHAPES) + _VOCABULARY * _HIDDEN)

    def attention_pairs(self) -> int:
        """The number of multiplications of keys and values, each by the queries that see it."""
        keys = sum(sum(range(first + 1, end + 1)) for first, end in self.chunks())
        return self.num_sequences * keys * _LAYERS * _HEADS * 2 * _HEAD_DIM


def measure(prompt: Prompt, readers: list[Reader], peak: Peak, rounds: int) -> None:
    splits: dict[Reader, list[Split]] = {reader: [] for reader in readers}
    peaks: dict[str, list[float]] = {precision: [] for precision in _FORMATS}
    for _ in range(rounds + 1):
        for reader in readers:
            splits[reader].append(prompt.split(reader))
        for precision, values in peaks.items():
            values.append(peak.pairs_per_second(precision))
    at_most = {precision: statistics.median(values) for precision, values in peaks.items()}
    for reader in readers:
        whole, attention, products = (statistics.median(column) for column in zip(*splits[reader][1:], strict=True))
        attention_floor = prompt.attention_pairs() / at_most["bfloat16"]
        product_floor = prompt.product_pairs() / at_most[reader.precision]
        rows = prompt.num_sequences * (prompt.last or prompt.length)
        print(
            f"| {reader.name} | {reader.precision} | {prompt.num_sequences} x {prompt.length} | {rows / whole:.0f} | "
            f"{1e3 * whole:.1f} | {(attention_floor + product_floor) / whole:.2f} | "
            f"{1e3 * attention:.1f} ({attention_floor / attention:.2f}) | {1e3 * products:.1f} "
            f"({product_floor / products:.2f}) | {1e3 * (whole - attention - products):.1f} | "
            f"{at_most['bfloat16'] / 1e9:.0f}, {at_most[reader.precision] / 1e9:.0f} |",
            flush=True,
        )


def libraries(before: Path | None, instructions: str) -> dict[str, Kernels]:
    loaded = {}
    if before is not None:
        with patch.object(build, "SOURCES", before):
            loaded["before"] = Kernels(build.library(instructions))
    return {**loaded, "after" if before else "now": Kernels(build.library(instructions))}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--lens", type=int, nargs="+", default=[128, 512, 2048, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--last", type=int, default=0)
    parser.add_argument("--precisions", nargs="+", choices=list(_FORMATS), default=list(_FORMATS))
    parser.add_argument("--instructions", choices=list(build.INSTRUCTIONS), default=usable_instructions()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    peak, kernels = Peak(args.instructions), libraries(args.before, args.instructions)
    readers = [Reader(name, each, precision) for precision in args.precisions for name, each in kernels.items()]
    print(f"{torch.get_num_threads()} threads, {args.instructions}; shares of the peak in parentheses")
    print(
        "| kernels | precision | prompts | tokens/s | ms | of the peak | attention, ms | products, ms | rest, ms |",
        end="",
    )
    print(" peak: attention, products, 10⁹/s |\n|---|---|---|---|---|---|---|---|---|---|")
    for num_sequences in args.batches:
        for length in args.lens:
            measure(Prompt(num_sequences, length, args.last), readers, peak, args.rounds)


if __name__ == "__main__":
    main()
