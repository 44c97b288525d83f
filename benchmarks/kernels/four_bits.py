"""Products with packed weights read from memory, by weight format and number of rows: interleaved, best tenth of the rounds.

    python -m benchmarks.kernels.four_bits [--threads 1 2] [--rows 1 2 3 4 5 6 8 16] [--inputs 2048] [--before DIR]

Every format multiplies as many different matrices [2048, inputs] as fill `--megabytes` together, so that none of them is
still cached from the last round. The ratio is the time of int8 with one scale per output over that of the format. --before
is the folder of another version of foredraft/kernels with the same structs: both multiply in turn, and the ratio is the
time before over the time after.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kernels.prompt_reading import libraries
from foredraft.kernels import (
    Kernels,
    PackedMatrix,
    QuantizedWeight,
    load_kernels,
    quantize_int4,
    quantize_int8,
    unquantized,
    why_none,
)
from foredraft.kernels.start import usable_instructions
from foredraft.utils.tensors import num_bytes

_OUTPUTS = 2048


def grouped(
    inputs: int, bits: int, group: int, *, has_offsets: bool = False, levels: torch.Tensor | None = None
) -> QuantizedWeight:
    most = 1 << (bits - 1)
    codes = torch.randint(-most, most, (_OUTPUTS, inputs), dtype=torch.int8)
    if levels is not None:
        codes = levels[codes.long() + most]
    shape = (_OUTPUTS, inputs // group)
    offsets = torch.rand(shape) + 1 if has_offsets else None
    return QuantizedWeight(codes, torch.rand(shape) + 0.01, offsets, group, bits, levels)


def formats(inputs: int) -> dict[str, Callable[[], QuantizedWeight | torch.Tensor]]:
    levels = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
    weight = torch.randn(_OUTPUTS, inputs)
    return {
        "int8, a scale per output": lambda: quantize_int8(weight),
        "bfloat16": lambda: unquantized(weight),
        "int4, groups of 32": lambda: quantize_int4(weight),
        "int4, groups of 128": lambda: grouped(inputs, 4, 128),
        "int4, groups of 32, offsets": lambda: grouped(inputs, 4, 32, has_offsets=True),
        "16 levels, groups of 32": lambda: grouped(inputs, 4, 32, levels=levels),
        "int8, groups of 32": lambda: grouped(inputs, 8, 32),
        "int8, groups of 16": lambda: grouped(inputs, 8, 16),
    }


class Matrices:
    """Different matrices of one format, packed for one library."""

    def __init__(self, kernels: Kernels, make: Callable[[], QuantizedWeight | torch.Tensor], megabytes: int) -> None:
        first = kernels.pack(make())
        self._kernels, self.bytes_each = kernels, num_bytes(first.tensors.values())
        self.num_weights = first.out_features * first.in_features
        self._each = [first, *(kernels.pack(make()) for _ in range(megabytes * 2**20 // self.bytes_each))]

    def seconds(self, x: torch.Tensor) -> list[float]:
        return [self._seconds(matrix, x) for matrix in self._each]

    def _seconds(self, matrix: PackedMatrix, x: torch.Tensor) -> float:
        start = time.perf_counter()
        self._kernels.linear(matrix, x)
        return time.perf_counter() - start


def best(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def measure(matrices: dict[str, Matrices], x: torch.Tensor, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in matrices}
    for _ in range(rounds):
        for name, several in matrices.items():
            times[name] += several.seconds(x)
    return {name: best(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 16])
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="only formats whose names contain one of these")
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    if load_kernels() is None:
        raise SystemExit(f"nothing to measure here: {why_none()}")
    wanted = {
        name: make
        for i, (name, make) in enumerate(formats(args.inputs).items())
        if any(part in name for part in args.only) or (i == 0 and not args.before)
    }
    kernels = libraries(args.before, usable_instructions()[0])
    print(f"| threads | rows | format | bits a weight | µs | GB/s | {'before' if args.before else 'int8'} over it |")
    print("|---|---|---|---|---|---|---|")
    groups = [[name] for name in wanted] if args.before else [list(wanted)]
    for names in groups:
        matrices = {
            f"{version}, {name}" if args.before else name: Matrices(each, wanted[name], args.megabytes)
            for name in names
            for version, each in kernels.items()
        }
        for threads in args.threads:
            torch.set_num_threads(threads)
            for num_rows in args.rows:
                x = torch.randn(num_rows, args.inputs).to(torch.bfloat16)
                report(matrices, measure(matrices, x, args.rounds), num_rows)


def report(matrices: dict[str, Matrices], found: dict[str, float], num_rows: int) -> None:
    base = next(iter(found.values()))
    for name, took in found.items():
        size = matrices[name].bytes_each
        print(
            f"| {torch.get_num_threads()} | {num_rows} | {name} | {8 * size / matrices[name].num_weights:.2f} | "
            f"{1e6 * took:.0f} | {size / took / 1e9:.1f} | {base / took:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
