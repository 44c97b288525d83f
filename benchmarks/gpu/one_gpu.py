"""Speed and exactness on one GPU, in one call of at most eight minutes. Runs wherever there is a CUDA device.

    python -m benchmarks.gpu.one_gpu --out DIR --data DIR [--widen FILE] [--minutes 8] [--only PART...] [--toys]

Needs foredraft's packages, on a machine that does nothing else: other work on the processor slows every part down. --data: a folder
with prompts/mbpp.jsonl. --widen: the tool that makes a small checkpoint cost as much as a large one. --only: the parts to run; all by
default.

bandwidth: of a copy. decoding, batch_invariant_decoding: a random target of Llama-3.1-8B's shape, passes by batch size and by rows per
sequence, steps of the engine, `transformers` generate, and the kernels of a pass (decoding.py). products, attention: pieces of a step in
every variant of the kernels (pieces.py). speculation, heads: the embedded pair and head, widened to 1 B, greedy on code prompts,
against plain decoding and assisted generation (speculation.py). against_the_processor, invariance: whether texts are the same
(exactness.py).

A part that fails or has no time left is named in the table; the others are unaffected. --toys runs everything on toy models, to check
that the script runs, also without a GPU (TRITON_INTERPRET=1). Writes gpu.json after every part, and a short table at the end, which it also
prints: gpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from benchmarks.common.prompts import code_prompts
from benchmarks.gpu import decoding, exactness, pieces, speculation
from benchmarks.gpu.device import HAS_GPU
from benchmarks.gpu.size import TOYS, Size
from foredraft.utils.machine import this_machine


class Report:
    """The results so far, saved after every part. only: the names of the parts to run; empty: all."""

    def __init__(self, out: Path, minutes: float, only: Sequence[str]) -> None:
        self.file, self.result = out / "gpu.json", dict[str, Any]()
        self._only = only
        self._ends = time.monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._ends - time.monotonic()

    def part(self, name: str, measure: Callable[[], Any], needed: float) -> None:
        """Run a part if `needed` seconds are left, and keep its result, or the reason why there is none."""
        if self._only and name not in self._only:
            return
        if self.seconds_left < needed:
            self.result[name] = {"left_out": f"{self.seconds_left:.0f} s were left and it needs {needed:.0f}"}
        else:
            started = time.monotonic()
            try:
                self.result[name] = measure()
            except Exception as error:
                traceback.print_exc()
                self.result[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
            self.result.setdefault("seconds", {})[name] = round(time.monotonic() - started, 1)
        decoding.clear()
        self.file.write_text(json.dumps(self.result, indent=1))


def table(result: dict[str, Any]) -> Iterator[str]:
    """A summary, line by line."""
    speed = result.get("bandwidth", {}).get("bytes_per_second")
    if speed:
        yield f"copy: {speed / 1e12:.2f} TB/s"
    yield from decoding.table(result, speed)
    yield from pieces.table(result, speed)
    yield from speculation.table(result)
    yield from exactness.table(result)
    yield f"seconds: {result.get('seconds')}"
    yield f"{result.get('machine')}"
    for name, part in result.items():
        if isinstance(part, dict) and ("failed" in part or "left_out" in part):
            yield f"{name}: {part}"


def machine() -> dict[str, Any]:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, triton)}
    device = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda} if HAS_GPU else {}
    return {"date": datetime.date.today().isoformat(), **asdict(this_machine()), **versions, **device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--widen", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--toys", action="store_true")
    args = parser.parse_args()
    size = TOYS if args.toys else Size()
    report = Report(args.out, args.minutes, args.only)
    report.result["machine"] = machine()
    prompts = code_prompts(size.num_prompts, args.data)
    with tempfile.TemporaryDirectory() as folder:
        pair = None if args.widen is None else speculation.Widening(args.widen, Path(folder), size)
        report.part("bandwidth", lambda: decoding.bandwidth(size), 5)
        report.part("decoding", lambda: decoding.decoding(size), 40)
        if pair is not None:
            report.part("speculation", lambda: speculation.speculation(pair, prompts, size), 60)
            report.part("invariance", lambda: exactness.invariance(pair, prompts, size), 60)
        report.part("against_the_processor", lambda: exactness.against_the_processor(prompts, size), 40)
        report.part("batch_invariant_decoding", lambda: decoding.batch_invariant_decoding(size), 15)
        report.part("products", lambda: pieces.products(size.matrices, size.product_rows), 15)
        heads = (size.num_heads, size.num_kv_heads)
        report.part("attention", lambda: pieces.attention(*heads, size.contexts, (1, 8), size.parts), 5)
        if pair is not None:
            report.part("heads", lambda: speculation.heads(pair, prompts, size), 30)
    lines = "\n".join(table(report.result))
    (args.out / "gpu.md").write_text(f"# One GPU\n\n```text\n{lines}\n```\n")
    print(lines)


if __name__ == "__main__":
    main()
