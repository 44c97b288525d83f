"""Products with packed weights read from memory, by weight format and number of rows: interleaved, best tenth of the rounds.

    python -m benchmarks.kernels.four_bits [--threads 1 2] [--rows 1 2 3 4 5 6 8 16]

Every format multiplies as many different matrices [2048, 2048] as fill `--megabytes` together, so that none of them is
still cached from the last round. The ratio is the time of int8 with one scale per output over that of the format.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from foredraft.kernels import (
    Kernels,
    PackedMatrix,
    QuantizedWeight,
    load_kernels,
    quantize_int4,
    quantize_int8,
    why_none,
)
from foredraft.utils.tensors import num_bytes

_SIZE = 2048


def grouped(bits: int, group: int, *, has_offsets: bool = False, levels: torch.Tensor | None = None) -> QuantizedWeight:
    most = 1 << (bits - 1)
    codes = torch.randint(-most, most, (_SIZE, _SIZE), dtype=torch.int8)
    if levels is not None:
        codes = levels[codes.long() + most]
    shape = (_SIZE, _SIZE // group)
    offsets = torch.rand(shape) + 1 if has_offsets else None
    return QuantizedWeight(codes, torch.rand(shape) + 0.01, offsets, group, bits, levels)


def formats() -> dict[str, Callable[[], QuantizedWeight]]:
    levels = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
    weight = torch.randn(_SIZE, _SIZE)
    return {
        "int8, a scale per output": lambda: quantize_int8(weight),
        "int4, groups of 32": lambda: quantize_int4(weight),
        "int4, groups of 128": lambda: grouped(4, 128),
        "int4, groups of 32, offsets": lambda: grouped(4, 32, has_offsets=True),
        "16 levels, groups of 32": lambda: grouped(4, 32, levels=levels),
        "int8, groups of 32": lambda: grouped(8, 32),
        "int8, groups of 16": lambda: grouped(8, 16),
    }


def seconds(kernels: Kernels, matrix: PackedMatrix, x: torch.Tensor) -> float:
    start = time.perf_counter()
    kernels.linear(matrix, x)
    return time.perf_counter() - start


def best(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def measure(kernels: Kernels, matrices: dict[str, list[PackedMatrix]], num_rows: int, rounds: int) -> dict[str, float]:
    x = torch.randn(num_rows, _SIZE).to(torch.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in matrices}
    for _ in range(rounds):
        for name, several in matrices.items():
            times[name] += [seconds(kernels, matrix, x) for matrix in several]
    return {name: best(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 16])
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[""], help="only formats whose names contain one of these")
    args = parser.parse_args()
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit(f"nothing to measure here: {why_none()}")
    matrices = {}
    for name, make in formats().items():
        if any(part in name for part in args.only) or not matrices:
            first = kernels.pack(make())
            matrices[name] = [
                first,
                *(kernels.pack(make()) for _ in range(args.megabytes * 2**20 // num_bytes(first.tensors.values()))),
            ]
    print("| threads | rows | format | bits a weight | µs | GB/s | int8 over it |\n|---|---|---|---|---|---|---|")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for num_rows in args.rows:
            found = measure(kernels, matrices, num_rows, args.rounds)
            base = next(iter(found.values()))
            for name, took in found.items():
                size = num_bytes(matrices[name][0].tensors.values())
                print(
                    f"| {threads} | {num_rows} | {name} | {8 * size / _SIZE**2:.2f} | {1e6 * took:.0f} | "
                    f"{size / took / 1e9:.1f} | {base / took:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
