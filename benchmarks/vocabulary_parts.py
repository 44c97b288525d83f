"""Where the time of a top-p law over a large vocabulary goes, row by row as `sampling/laws.py` does it.

python benchmarks/vocabulary_parts.py [--vocab 151936] [--rows 48]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from vocabulary import peaked

from foredraft.sampling.laws import truncate
from foredraft.sampling.search import top_rows


def milliseconds(function: Callable[[int], object], num_rows: int, rounds: int = 7) -> float:
    """Median over rounds of the time for all rows, one after another."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for row in range(num_rows):
            function(row)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(0)
    logits = peaked((args.rows, args.vocab))
    wide = logits.float()
    probs = torch.softmax(wide / 0.8, dim=-1)
    parts: dict[str, Callable[[int], object]] = {
        "to float32": lambda r: logits[r : r + 1].float(),
        "divide by the temperature": lambda r: wide[r : r + 1] / 0.8,
        "softmax": lambda r: torch.softmax(wide[r : r + 1], dim=-1),
        "the 64 largest": lambda r: top_rows(probs[r : r + 1], 64),
        "truncate, the search included": lambda r: truncate(probs[r : r + 1], top_k=0, top_p=0.9, min_p=0.0),
    }
    print("| part | ms |\n|---|---|")
    for name, function in parts.items():
        print(f"| {name} | {milliseconds(function, args.rows):.1f} |")


if __name__ == "__main__":
    main()
