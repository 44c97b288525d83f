"""How long a checkpoint takes to load, and its peak memory.

    python -m benchmarks.engine.loading MODEL.gguf DIRECTORY ... [--quantization int8 int4] [--rounds 3] [--out FILE.json]

Each load runs in its own process, which has loaded the embedded target before, so the interpreter, PyTorch, transformers
and the compiled kernels are already loaded and do not count. The peak is the kernel's own figure (VmHWM), less what was
resident when the load began; pages of mapped files count. The tokenizer is loaded first and measured separately. Files are
in the page cache from the second round on. Medians over the rounds. Linux only.

The peak includes the cache of the sequences on which the model is tried. Weights of five and six bits are packed in eight:
for them the packed weights are the floor, not the file.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.common.paths import ROOT
from foredraft.utils.machine import this_machine

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Load:
    """file_bytes: of the weights' files. peak_bytes: while loading the model, above the tokenizer. resident_bytes: of the loaded model.
    weight_bytes: of its packed weights.
    """

    file_bytes: int
    tokenizer_seconds: float
    tokenizer_bytes: int
    seconds: float
    peak_bytes: int
    resident_bytes: int
    weight_bytes: int


def measured(model: Path, quantization: str | None = None) -> Load:
    """One load, in a new process."""
    command = [sys.executable, "-m", "benchmarks.engine.loading", "--worker", str(model)]
    if quantization is not None:
        command += ["--quantization", quantization]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{model} could not be loaded: {result.stderr.strip()[-500:]}")
    return Load(**json.loads(result.stdout.splitlines()[-1]))


def load_once(model: Path, quantization: str | None) -> Load:
    """Load in this process, which must not have loaded anything else before."""
    from foredraft import LLM
    from foredraft.errors import ModelError
    from foredraft.model import EMBEDDED, LoadOptions, load_tokenizer
    from foredraft.model.packed import weight_bytes

    LLM(EMBEDDED / "target", method="none", cache_memory=1 << 20)
    before = _settled()
    began = time.perf_counter()
    try:
        tokenizer = load_tokenizer(model, LoadOptions())
    except ModelError:
        tokenizer = None  # the checkpoint has none
    tokenizer_seconds = time.perf_counter() - began
    with_tokenizer = _settled()
    _CLEAR.write_text(_RESET_PEAK)
    began = time.perf_counter()
    llm = LLM(model, method="none", quantization=quantization, tokenizer=tokenizer)
    seconds = time.perf_counter() - began
    peak = _status("VmHWM")
    resident = _settled()
    return Load(
        _file_bytes(model),
        tokenizer_seconds,
        with_tokenizer - before,
        seconds,
        peak - with_tokenizer,
        resident - with_tokenizer,
        weight_bytes(llm.target.hf),
    )


def _settled() -> int:
    """Resident bytes, after freeing unused memory."""
    from foredraft.model.pages import give_back

    gc.collect()
    give_back([])
    return _status("VmRSS")


def _status(name: str) -> int:
    """A value of /proc/self/status, in bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _file_bytes(model: Path) -> int:
    files = model.glob("*.safetensors") if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files)


def _median(loads: list[Load]) -> Load:
    return Load(*(statistics.median(getattr(load, field.name) for load in loads) for field in fields(Load)))


def _table(loads: dict[str, Load]) -> str:
    rows = [
        "| file | size | tokenizer | model | peak | peak / file | packed weights | peak / packed | resident | tokenizer's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, load in loads.items():
        sizes = [load.peak_bytes, load.weight_bytes, load.resident_bytes, load.tokenizer_bytes]
        peak, packed, resident, tokenizer = (f"{size / 1e6:.0f} MB" for size in sizes)
        rows.append(
            f"| {name} | {load.file_bytes / 1e6:.0f} MB | {load.tokenizer_seconds:.1f} s | {load.seconds:.1f} s "
            f"| {peak} | {load.peak_bytes / load.file_bytes:.2f} | {packed} | {load.peak_bytes / load.weight_bytes:.2f} | {resident} | {tokenizer} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files, and directories with safetensors files")
    parser.add_argument("--quantization", nargs="+", help="also load directories with these quantizations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(asdict(load_once(args.models[0], args.quantization and args.quantization[0]))))
        return
    cases = [(model, None) for model in args.models]
    cases += [(model, name) for model in args.models if model.is_dir() for name in args.quantization or ()]
    rounds = [[measured(model.resolve(), name) for model, name in cases] for _ in range(args.rounds)]
    names = [f"{model.name}, {name}" if name else model.name for model, name in cases]
    loads = {name: _median(list(each)) for name, each in zip(names, zip(*rounds, strict=True), strict=True)}
    print(_table(loads))
    if args.out:
        result = {"machine": asdict(this_machine()), "loads": {name: asdict(load) for name, load in loads.items()}}
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
