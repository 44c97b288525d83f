"""How much longer a target's pass takes after a pause, in which other programs may use the cache that processors share.

    python -m benchmarks.kernels.pauses [--target DIR] [--precision int8] [--rows 1 3 5] [--pauses 0 1 3] [--threads 2] [--rounds 60]

Passes after pauses of all lengths, in milliseconds, take turns. A pause computes in Python on one thread, as drafting and verification
do between two passes. Figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from benchmarks.kernels.passes import Setting, load, name_of
from foredraft.model import EMBEDDED

_CONTEXT = 64


def busy(milliseconds: float) -> None:
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


def measure(setting: Setting, num_rows: int, pauses: list[float], rounds: int) -> list[float]:
    """The milliseconds of a pass after each pause."""
    times: dict[float, list[float]] = {pause: [] for pause in pauses}
    for number in range(rounds):
        first = number % len(pauses)
        for pause in [*pauses[first:], *pauses[:first]]:
            busy(pause)
            times[pause].append(1e3 * setting.seconds(num_rows))
    return [statistics.median(each) for each in times.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--precision", choices=["int4", "int8", "bfloat16"], default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--pauses", type=float, nargs="+", default=[0.0, 1.0, 3.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    [(precision, model)] = load(args.target, [args.precision], without_kernels=False).items()
    setting = Setting(name_of(args.target), precision, model, list(range(5, 5 + _CONTEXT)))
    print(f"{setting.name}, {precision}, {args.threads} threads\n")
    print(f"| rows | {' | '.join(f'after {pause:g} ms' for pause in args.pauses)} |")
    print("|---" * (1 + len(args.pauses)) + "|")
    for num_rows in args.rows:
        found = measure(setting, num_rows, args.pauses, args.rounds)
        print(f"| {num_rows} | {' | '.join(f'{each:.2f} ({each / found[0]:.2f} x)' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
