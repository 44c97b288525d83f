"""The benchmark's target: the embedded one widened until it costs what 0.4 billion parameters cost. Needs torch.

python -m benchmarks.peers.workers.checkpoint FOLDER     writes FOLDER/target and FOLDER/draft
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.paths import ROOT, SHARED

_WIDEN = SHARED / "tools" / "widen.py"
_EMBEDDED = ROOT / "src" / "foredraft" / "embedded"
_SIZE = ("--hidden", "1024", "--layers", "24", "--intermediate", "4096", "--heads", "16")
_SPECK = 1e-6


def build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "target.new"
    shutil.rmtree(new, ignore_errors=True)
    subprocess.run([sys.executable, _WIDEN, _EMBEDDED / "target", new, *_SIZE], check=True)
    tell_apart(new / "model.safetensors")
    shutil.copytree(_EMBEDDED / "draft", folder / "draft", dirs_exist_ok=True)
    new.rename(folder / "target")


def tell_apart(file: Path) -> None:
    """Make every all-zero matrix a different one.

    The widened model's idle layers write zeros back. OpenVINO's converter keeps equal constants once, and would read a
    fifth fewer weights per pass than the others: so each gets one entry of its own, in the last row, which is padding
    that no real layer reads. The residual stream changes by about 1e-6 there, the logits by about 1e-8.
    """
    weights = load_file(file)
    blank = [weight for weight in weights.values() if weight.ndim == 2 and not weight.any()]
    for index, weight in enumerate(blank):
        weight[-1, index] = _SPECK
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(Path(sys.argv[1]))
