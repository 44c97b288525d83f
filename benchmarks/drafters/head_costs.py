"""What heads cost in memory and time per step, compared with the values computed from their sizes.

    python -m benchmarks.drafters.head_costs [--target DIR] [--precisions bfloat16 int8] [--kinds eagle3 medusa exit dspark]
        [--heads DIR ...] [--gamma 4] [--rounds 6]

Heads have random weights unless --heads names some: their costs depend only on their shapes. Each is compared with what `foredraft
inspect` computes from its files. Memory: of the weights, and per token of a text (the hidden states that the head reads, and its own
keys and values). Time: drafting γ tokens, as a share of a pass of the target, next to the share of its bytes that are read (for EAGLE
and early exits γ times those of one drafted token, for the others those of one pass). "outside" is the share of a step that is spent
outside the passes of target and head. Code prompts, greedy; systems alternate prompt by prompt; medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.prompts import code_prompts
from benchmarks.engine.step_overhead import Stopwatch, System
from foredraft import LLM
from foredraft.heads import ExitConfig
from foredraft.model import EMBEDDED, LoadOptions, load_model
from foredraft.tools.inspection.inspect import inspect_models
from foredraft.tools.inspection.report import HeadReport
from foredraft.train import DSparkKind, Eagle3Kind, ExitKind, MedusaKind

KINDS: dict[str, Any] = {
    "eagle3": Eagle3Kind(),
    "medusa": MedusaKind(),
    "exit": ExitKind(exit_layer=2),
    "dspark": DSparkKind(block_size=5, mask_token=0),
}
_STEP_BY_STEP = ("eagle1", "eagle3", ExitConfig.kind)


@dataclass
class Measured:
    """A head and its measurements. draft_ms: the head's time per step."""

    name: str
    report: HeadReport
    system: System
    watch: Stopwatch
    draft_ms: list[float] = field(default_factory=list)


@contextmanager
def made(args: argparse.Namespace) -> Iterator[dict[str, Path]]:
    """Folders of heads, by name."""
    if args.heads:
        yield {Path(folder).name: Path(folder) for folder in args.heads}
        return
    target = load_model(str(args.target), LoadOptions(device="cpu"))
    with tempfile.TemporaryDirectory() as folder:
        heads = {kind: Path(folder) / kind for kind in args.kinds}
        for kind, path in heads.items():
            head = KINDS[kind].new(target, [], seed=0)
            KINDS[kind].save(head, target, str(args.target), path, torch.bfloat16)
        del target
        yield heads


def measure(args: argparse.Namespace, precision: str, heads: dict[str, Path]) -> tuple[System, list[Measured]]:
    quantization = "none" if precision == "bfloat16" else precision
    options: dict[str, Any] = {"quantization": quantization, "dtype": "bfloat16", "enable_prefix_caching": False}
    plain = System("none", LLM(args.target, method="none", **options), 0)
    found = []
    for name, folder in heads.items():
        llm = LLM(args.target, folder, **options)
        loading = LoadOptions(device="cpu", dtype="bfloat16", quantization=quantization)
        report = inspect_models(args.target, folder, loading).head
        assert report is not None
        system = System(name, llm, args.gamma)
        found.append(Measured(name, report, system, Stopwatch(system.parts_of_head)))
    prompts = code_prompts(args.rounds)
    for prompt in prompts:
        plain.measure([prompt], args.max_tokens)
        for each in found:
            before, steps = each.watch.seconds, each.system.num_steps
            each.system.measure([prompt], args.max_tokens)
            each.draft_ms.append(1e3 * (each.watch.seconds - before) / (each.system.num_steps - steps))
    return plain, found


def row(each: Measured, precision: str, target_ms: float, gamma: int) -> str:
    report, draft_ms = each.report, statistics.median(each.draft_ms)
    read = report.step_bytes[report.precision or precision] * (gamma if report.kind in _STEP_BY_STEP else 1)
    passes = report.target_pass_bytes
    computed = None if passes is None else read / passes[precision]
    assert report.measured is not None
    cells = [
        mebibytes(report.predicted.weight_bytes),
        mebibytes(report.measured.weight_bytes),
        f"{report.predicted.cache_bytes_per_token}",
        f"{report.measured.cache_bytes_per_token}",
        "-" if computed is None else f"{computed:.2f}",
        f"{draft_ms / target_ms:.2f}",
        f"{draft_ms:.2f}",
        f"{statistics.median(each.system.step_ms):.2f}",
        f"{100 * statistics.median(each.system.outside):.1f} %",
    ]
    return f"| {precision} | {each.name} | {' | '.join(cells)} |"


def mebibytes(amount: int | None) -> str:
    return "-" if amount is None else f"{amount / 2**20:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--precisions", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--heads", nargs="*", default=[])
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    print(f"γ = {args.gamma}, {args.max_tokens} tokens, {torch.get_num_threads()} threads\n")
    print(
        "| precision | head | weights, MiB: computed | measured | bytes a token: computed | measured "
        "| a draft over a pass: by bytes | measured | a draft, ms | step, ms | outside |\n" + "|---" * 11 + "|"
    )
    with made(args) as heads:
        for precision in args.precisions:
            plain, found = measure(args, precision, heads)
            target_ms = statistics.median(plain.step_ms) * (1 - statistics.median(plain.outside))
            for each in found:
                print(row(each, precision, target_ms, args.gamma), flush=True)
            print(
                f"| {precision} | none | | | | | | | | {statistics.median(plain.step_ms):.2f} | {100 * statistics.median(plain.outside):.1f} % |"
            )


if __name__ == "__main__":
    main()
