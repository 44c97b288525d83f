"""The peak memory of training heads, compared with what training predicts before its first step.

    python -m benchmarks.training.peak_memory --text FILE [--target DIR] [--steps 3] [--context 512] [--batch-size 4]

Every kind of head, in float32 and bfloat16, each in its own process. FILE: the text to train on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from foredraft.model import EMBEDDED

SETTINGS = {
    "eagle3, 5 tokens deep": ("--kind", "eagle3", "--unroll", "5"),
    "eagle3, 2 tokens deep, the target's lm_head": ("--kind", "eagle3", "--unroll", "2", "--share-lm-head"),
    "medusa, 4 heads": ("--kind", "medusa", "--heads", "4"),
    "exit after layer 2": ("--kind", "exit", "--exit-layer", "2"),
}


def measured(args: argparse.Namespace, kind: tuple[str, ...], dtype: str) -> dict[str, int]:
    """-> predicted and measured memory, in bytes"""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "foredraft.cli", "train", "head", "--target", str(args.target), *kind),
            *("--data", str(args.text), "--out", f"{folder}/head", "--dtype", dtype, "--steps", str(args.steps)),
            *(
                "--context",
                str(args.context),
                "--batch-size",
                str(args.batch_size),
                "--validation-share",
                "0",
                "--json",
            ),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    memory: dict[str, int] = json.loads(done.stdout)["memory"]
    return memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--target", default=EMBEDDED / "target")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--kinds", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    args = parser.parse_args()
    print("| head | products | predicted, MiB | measured, MiB | off by |\n|---|---|---|---|---|", flush=True)
    for name in args.kinds:
        for dtype in ("float32", "bfloat16"):
            memory = measured(args, SETTINGS[name], dtype)
            off = memory["predicted"] / memory["measured"] - 1
            mebibytes = [f"{memory[key] / 2**20:.0f}" for key in ("predicted", "measured")]
            print(f"| {name} | {dtype} | {' | '.join(mebibytes)} | {off:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
