"""The parts of plain decoding and sampling before and after each change to the kernels, interleaved.

python -m benchmarks.kernels.before_and_after [--vocab 151936]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from benchmarks.kernels.large_vocabulary import peaked
from foredraft.engine.memory_pool import MemoryPool
from foredraft.kernels import WeightFormat, load_kernels, quantize_int8, unquantized, why_none
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.model.packed import NativeLinear, PackedLinear
from foredraft.sampling.search import argmax_rows, top_rows
from foredraft.sampling.token_probs import _top

_PROMPT = list(range(10, 110))


def one_step(model: LanguageModel) -> Callable[[], object]:
    """The pass of a plain decoding step after a hundred tokens."""
    cache = model.new_cache(MemoryPool(1 << 28))
    cache.reserve(0, 256)
    model.read([Read(0, _PROMPT, 1)], cache)

    def step() -> None:
        model.read([Read(0, [5], 1)], cache)
        cache.keep_prefix_of(0, _PROMPT)

    return step


def products(make: Callable[[torch.Tensor], torch.nn.Module] | None) -> Callable[[], object]:
    """Two rows through the products of eight layers, so that no weight is still cached from its last use. make: None for F.linear."""
    shapes = [(768, 256), (256, 256), (1408, 256), (256, 704)] * 8
    weights = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    inputs = {width: torch.randn(2, width).to(torch.bfloat16) for width in (256, 704)}
    layers = [make(weight) for weight in weights] if make else []

    def run() -> None:
        for i, weight in enumerate(weights):
            x = inputs[weight.shape[1]]
            layers[i](x) if layers else functional.linear(x, weight)

    return run


def pairs(vocab: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit(f"nothing to compare here: {why_none()}")
    options = LoadOptions(dtype="bfloat16", device="cpu")
    ours = {name: load_model(EMBEDDED / "target", replace(options, kernels=name)) for name in ("torch", "auto")}
    eight = load_model(EMBEDDED / "target", replace(options, quantization="int8"))
    library = load_model(AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.bfloat16), options)
    logits = peaked((48, vocab))
    probs = torch.softmax(logits.float(), dim=-1)
    temperatures = torch.full((48,), 0.8)

    def native(weight_format: WeightFormat) -> Callable[[torch.Tensor], torch.nn.Module]:
        return lambda weight: NativeLinear(kernels.pack(weight_format(weight)), kernels)

    return {
        "target pass, the library's layers → packed by oneDNN": (one_step(library), one_step(ours["torch"])),
        "target pass, packed by oneDNN → one call": (one_step(ours["torch"]), one_step(ours["auto"])),
        "target pass, one call, bfloat16 → int8": (one_step(ours["auto"]), one_step(eight)),
        "32 products of two rows, F.linear → packed by oneDNN": (
            products(None),
            products(lambda weight: PackedLinear(weight, None)),
        ),
        "the same, packed by oneDNN → our kernel": (
            products(lambda weight: PackedLinear(weight, None)),
            products(native(unquantized)),
        ),
        "the same, our kernel, bfloat16 → int8": (products(native(unquantized)), products(native(quantize_int8))),
        "argmax of 48 rows, PyTorch → kernel": (lambda: logits.argmax(-1), lambda: argmax_rows(logits)),
        "64 largest of 48 rows, topk → block maxima": (lambda: probs.topk(64, -1), lambda: top_rows(probs, 64)),
        "softmax and 64 largest of 48 rows, PyTorch → kernel": (
            lambda: _top(logits, temperatures, 64),
            lambda: kernels.top(logits, temperatures, 64),
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
            for function, result in zip(functions, times, strict=True):
                start = time.perf_counter()
                function()
                result.append(time.perf_counter() - start)
        before, after = (1e3 * statistics.median(result[2:]) for result in times)
        print(f"| {name} | {before:.3g} | {after:.3g} |")


if __name__ == "__main__":
    main()
