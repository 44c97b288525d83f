"""The parts that plain decoding and sampling were made of before and after each change, interleaved.

python benchmarks/parts.py [--vocab 151936]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from vocabulary import peaked

from foredraft.cache import MemoryPool
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.model.packed import PackedLinear
from foredraft.sampling.laws import tempered, truncate, truncated
from foredraft.sampling.search import argmax_rows, top_rows

_PROMPT = list(range(10, 110))


def one_step(model: LanguageModel) -> Callable[[], object]:
    """A plain decoding step's pass behind a hundred tokens."""
    cache = model.new_cache(MemoryPool(1 << 28))
    cache.reserve(0, 256)
    model.read([Read(0, _PROMPT, 1)], cache)

    def step() -> None:
        model.read([Read(0, [5], 1)], cache)
        cache.keep_prefix_of(0, _PROMPT)

    return step


def products(packed: bool) -> Callable[[], object]:
    """Two rows through the products of eight layers, so that no weight is warm from the last use."""
    shapes = [(768, 256), (256, 256), (1408, 256), (256, 704)] * 8
    weights = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    inputs = {width: torch.randn(1, 2, width).to(torch.bfloat16) for width in (256, 704)}
    layers = [PackedLinear(weight, None) for weight in weights] if packed else []

    def run() -> None:
        for i, weight in enumerate(weights):
            x = inputs[weight.shape[1]]
            layers[i].forward(x) if packed else functional.linear(x, weight)

    return run


def pairs(vocab: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    ours = load_model(EMBEDDED / "target", LoadOptions(dtype="bfloat16", device="cpu"))
    ours.take_over()
    library = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.bfloat16).eval()
    logits = peaked((48, vocab))
    probs = torch.softmax(logits.float(), dim=-1)
    x, weight = torch.randn(1, 2, 256).to(torch.bfloat16), torch.randn(256).to(torch.bfloat16)

    def norm_by_hand() -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16) * weight

    temperatures = torch.full((48,), 0.8)
    return {
        "target pass, the library's layers → packed and fused": (
            one_step(load_model(library, LoadOptions())),
            one_step(ours),
        ),
        "32 products of two rows, F.linear → packed": (products(False), products(True)),
        "rms_norm by hand → torch.rms_norm": (norm_by_hand, lambda: torch.rms_norm(x, (256,), weight, 1e-6)),
        "argmax of 48 rows → block maxima": (lambda: logits.argmax(-1), lambda: argmax_rows(logits)),
        "64 largest of 48 rows, topk → block maxima": (lambda: probs.topk(64, -1), lambda: top_rows(probs, 64)),
        "top-p laws of 48 rows at once → a few rows at a time in the same memory": (
            lambda: truncate(tempered(logits, temperatures), top_k=0, top_p=0.9, min_p=0.0),
            lambda: truncated(logits, temperatures, top_k=0, top_p=0.9, min_p=0.0),
        ),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print("| change | before, ms | after, ms |\n|---|---|---|")
    for name, functions in pairs(args.vocab).items():
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds + 2):
            for function, found in zip(functions, times, strict=True):
                start = time.perf_counter()
                function()
                found.append(time.perf_counter() - start)
        before, after = (1e3 * statistics.median(found[2:]) for found in times)
        print(f"| {name} | {before:.3g} | {after:.3g} |")


if __name__ == "__main__":
    main()
