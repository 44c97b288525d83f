"""A target's pass by number of rows and by length of context, beside the floor: its bytes over the memory's bandwidth.

    python -m benchmarks.kernels.passes [--target DIR] [--rows 1 2 4 5 8 12 16 24 40] [--contexts 64 1024 4096]

The bandwidth is that of a sum over 0.8 GB, taken again between the passes. Random tokens; medians; precisions alternate.
What is read: every weight but the embedding, and the keys and values of the context.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from foredraft.engine.cache import KVCache, MemoryPool
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.model.packed import weight_bytes

_MORE = 64


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class Setting:
    """One model behind one context."""

    def __init__(self, name: str, model: LanguageModel, tokens: list[int]) -> None:
        self.name, self.model, self.tokens = name, model, tokens
        self.cache: KVCache = model.new_cache(MemoryPool(1 << 34))
        self.cache.reserve(0, len(tokens) + _MORE)
        for i in range(0, len(tokens), 512):
            model.read([Read(0, tokens[i : i + 512], 1)], self.cache)

    def seconds(self, num_rows: int) -> float:
        took = timed(lambda: self.model.read([Read(0, [5] * num_rows, num_rows)], self.cache))
        self.cache.keep_prefix_of(0, self.tokens)
        return took

    @property
    def num_bytes(self) -> int:
        embedding = self.model.hf.get_input_embeddings().weight
        weights = weight_bytes(self.model.hf) - embedding.numel() * embedding.element_size()
        return weights + len(self.tokens) * self.model.traits.bytes_per_token


def measure(settings: list[Setting], num_rows: int, stream: torch.Tensor, rounds: int) -> None:
    times: dict[str, list[float]] = {setting.name: [] for setting in settings}
    sums = []
    for _ in range(rounds + 1):
        for setting in settings:
            times[setting.name].append(setting.seconds(num_rows))
        sums.append(timed(stream.sum))
    bandwidth = stream.numel() * stream.element_size() / statistics.median(sums[1:])
    for setting in settings:
        took, floor = statistics.median(times[setting.name][1:]), setting.num_bytes / bandwidth
        print(
            f"| {setting.name} | {len(setting.tokens)} | {num_rows} | {1e3 * took:.1f} | {1e3 * floor:.1f} | "
            f"{took / floor:.2f} | {bandwidth / 1e9:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 5, 8, 12, 16, 24, 40])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help="bfloat16 without the compiled kernels too")
    args = parser.parse_args()
    options = {
        "bfloat16": LoadOptions(dtype="bfloat16", device="cpu"),
        "int8": LoadOptions(dtype="bfloat16", device="cpu", quantization="int8"),
    }
    if args.torch:
        options["bfloat16, PyTorch"] = LoadOptions(dtype="bfloat16", device="cpu", kernels="torch")
    models = {name: load_model(args.target, option) for name, option in options.items()}
    stream = torch.ones(200_000_000)
    generator = torch.Generator().manual_seed(0)
    print("| precision | context | rows | ms | floor, ms | over the floor | GB/s |\n|---|---|---|---|---|---|---|")
    for context in args.contexts:
        tokens = torch.randint(5, 4000, (context,), generator=generator).tolist()
        settings = [Setting(name, model, tokens) for name, model in models.items()]
        for num_rows in args.rows if context == args.contexts[0] else [1, 5]:
            measure(settings, num_rows, stream, args.rounds)


if __name__ == "__main__":
    main()
