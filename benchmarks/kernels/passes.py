"""A target's pass by number of rows and context length, against its floor: the larger of its bytes over the memory bandwidth and its
multiplications over the processor's peak, both measured between the passes.

    python -m benchmarks.kernels.passes [--target DIR FILE.gguf ...] [--precisions int4 int8 bfloat16] [--rows 1 5 8]
        [--contexts 64] [--threads 1] [--save]

Random tokens; precisions take turns; figures are medians, and the ratio is the median of the rounds' ratios. A GGUF file runs in the
precision in which it is stored. The bytes are those of every packed weight with its scales (of the embedding only if it is also the
lm_head), and of the keys and values of the context. The multiplications are those of every matrix by every row, and of the queries by
the keys and values that they see. Sliding windows and experts are ignored: use it for dense models and contexts within a window.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmarks.common.paths import RESULTS
from benchmarks.kernels.limits import Bandwidth, Peak, timed
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.kernels import load_kernels, why_none
from foredraft.kernels.start import usable_instructions
from foredraft.kernels.weights import BF16
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, Read, load_model
from foredraft.model.packed import NativeLinear, weight_bytes
from foredraft.utils.tensors import num_bytes

_MORE = 64
_STORED = "as stored"
_OPTIONS = {
    "int4": LoadOptions(dtype="bfloat16", device="cpu", quantization="int4"),
    "int8": LoadOptions(dtype="bfloat16", device="cpu", quantization="int8"),
    "bfloat16": LoadOptions(dtype="bfloat16", device="cpu"),
}
_WITHOUT_KERNELS = {"bfloat16, PyTorch": LoadOptions(dtype="bfloat16", device="cpu", kernels="torch")}
HEAD = (
    "| model | precision | context | rows | ms | bytes, ms | multiplications, ms | over the floor | GB/s | 10⁹ int8/s |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured in one round. bandwidth: bytes per second. floats, int8: multiplications per second."""

    bandwidth: float
    floats: float
    int8: float


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one pass. floats, int8: number of multiplications."""

    num_bytes: int
    floats: int
    int8: int

    def floors(self, limits: Limits) -> tuple[float, float]:
        """The seconds needed for the bytes, and for the multiplications."""
        return self.num_bytes / limits.bandwidth, self.floats / limits.floats + self.int8 / limits.int8


@dataclass(frozen=True, slots=True)
class Pass:
    """Medians. ratio: the time over the larger floor."""

    model: str
    precision: str
    context: int
    rows: int
    threads: int
    milliseconds: float
    bytes_floor: float
    multiplications_floor: float
    ratio: float
    gigabytes_per_s: float
    int8_per_s: float


def bytes_read(hf: PreTrainedModel) -> int:
    """Bytes of weights read in a pass: all except an embedding that is not the lm_head, of which only a few rows are read."""
    head = {id(tensor) for tensor in _tensors(hf.get_output_embeddings())}
    looked_up = [tensor for tensor in _tensors(hf.get_input_embeddings()) if id(tensor) not in head]
    return weight_bytes(hf) - num_bytes(looked_up)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def multiplications(hf: PreTrainedModel) -> tuple[int, int]:
    """Of one row by all matrices: the number in floating point, and in int8."""
    matrices = [module.matrix for module in hf.modules() if isinstance(module, NativeLinear)]
    sizes = [(matrix.layout.kind == BF16, matrix.out_features * matrix.in_features) for matrix in matrices]
    return sum(size for is_float, size in sizes if is_float), sum(size for is_float, size in sizes if not is_float)


class Setting:
    """One model after one context."""

    def __init__(self, name: str, precision: str, model: LanguageModel, tokens: list[int]) -> None:
        self.name, self.precision, self.model, self.tokens = name, precision, model, tokens
        self.cache: KVCache = model.new_cache(MemoryPool(1 << 34))
        self.cache.reserve(0, len(tokens) + _MORE)
        for i in range(0, len(tokens), 512):
            model.read([Read(0, tokens[i : i + 512], 1)], self.cache)

    def seconds(self, num_rows: int) -> float:
        took = timed(lambda: self.model.read([Read(0, [5] * num_rows, num_rows)], self.cache))
        self.cache.keep_prefix_of(0, self.tokens)
        return took

    def work(self, num_rows: int) -> Work:
        hf, context = self.model.hf, len(self.tokens)
        text = hf.config.get_text_config()
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        keys = sum(range(context + 1, context + num_rows + 1))
        attention = 2 * keys * text.num_hidden_layers * text.num_attention_heads * head_dim
        floats, int8 = multiplications(hf)
        num_bytes = bytes_read(hf) + context * self.model.traits.bytes_per_token
        return Work(num_bytes, num_rows * floats + attention, num_rows * int8)


class Machine:
    """Measures the limits of the machine again each time."""

    def __init__(self) -> None:
        self._peak, self._bandwidth = Peak(usable_instructions()[0]), Bandwidth()

    def limits(self) -> Limits:
        floats, int8 = (self._peak.pairs_per_second(name) for name in ("bfloat16", "int8"))
        return Limits(self._bandwidth.bytes_per_second(), floats, int8)


def measure(settings: list[Setting], num_rows: int, machine: Machine, rounds: int) -> list[Pass]:
    times: list[list[float]] = [[] for _ in settings]
    limits = []
    for _ in range(rounds + 1):
        for setting, each in zip(settings, times, strict=True):
            each.append(setting.seconds(num_rows))
        limits.append(machine.limits())
    return [_pass(setting, num_rows, each[1:], limits[1:]) for setting, each in zip(settings, times, strict=True)]


def _pass(setting: Setting, num_rows: int, times: list[float], limits: list[Limits]) -> Pass:
    work = setting.work(num_rows)
    floors = [work.floors(each) for each in limits]
    of_bytes, of_multiplications = (statistics.median(column) for column in zip(*floors, strict=True))
    return Pass(
        setting.name,
        setting.precision,
        len(setting.tokens),
        num_rows,
        torch.get_num_threads(),
        1e3 * statistics.median(times),
        1e3 * of_bytes,
        1e3 * of_multiplications,
        statistics.median(took / max(floor) for took, floor in zip(times, floors, strict=True)),
        statistics.median(each.bandwidth for each in limits) / 1e9,
        statistics.median(each.int8 for each in limits) / 1e9,
    )


def row(result: Pass) -> str:
    return (
        f"| {result.model} | {result.precision} | {result.context} | {result.rows} | {result.milliseconds:.2f} | "
        f"{result.bytes_floor:.2f} | {result.multiplications_floor:.2f} | {result.ratio:.2f} | "
        f"{result.gigabytes_per_s:.1f} | {result.int8_per_s:.0f} |"
    )


def load(target: Path, precisions: list[str], *, without_kernels: bool) -> dict[str, LanguageModel]:
    if target.is_file():
        return {_STORED: load_model(target, LoadOptions(device="cpu"))}
    options = {name: _OPTIONS[name] for name in precisions} | (_WITHOUT_KERNELS if without_kernels else {})
    return {name: load_model(target, option) for name, option in options.items()}


def name_of(target: Path) -> str:
    """The folder's name, with its parent's where the name alone does not tell which model it is (.../smollm2/target)."""
    return f"{target.parent.name}/{target.name}" if target.name == "target" else target.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, nargs="+", default=[EMBEDDED / "target"])
    parser.add_argument("--precisions", nargs="+", choices=list(_OPTIONS), default=list(_OPTIONS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torch", action="store_true", help="also measure bfloat16 without the compiled kernels")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/passes.json and .md")
    args = parser.parse_args()
    if load_kernels() is None:
        raise SystemExit(f"nothing to measure: {why_none()}")
    torch.set_num_threads(args.threads)
    machine, generator = Machine(), torch.Generator().manual_seed(0)
    print(HEAD)
    results: list[Pass] = []
    for target in args.target:
        models = load(target, args.precisions, without_kernels=args.torch)
        for context in args.contexts:
            tokens = torch.randint(5, 4000, (context,), generator=generator).tolist()
            settings = [Setting(name_of(target), precision, model, tokens) for precision, model in models.items()]
            for num_rows in args.rows:
                results += measure(settings, num_rows, machine, args.rounds)
                print("\n".join(map(row, results[-len(settings) :])), flush=True)
    if args.save:
        (RESULTS / "passes.json").write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
        (RESULTS / "passes.md").write_text("\n".join([HEAD, *map(row, results)]) + "\n")


if __name__ == "__main__":
    main()
