"""The checkpoints from which all programs get their models, in bfloat16 and Hugging Face format. Needs torch.

    python -m benchmarks.peers.workers.checkpoint NAME FOLDER     writes FOLDER/target, and FOLDER/draft if there is one

* embedded: the embedded target widened until it costs what 0.4 billion parameters cost, and the embedded draft.
* smollm2: SmolLM2-135M-Instruct, dequantised from the file that `make models` fetches (four bits, so it differs a little
  from the published model).
* smollm2-wide: the same, widened to about 1.8 billion parameters.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.paths import ROOT, SHARED
from recipes.real_models import SMOLLM2, models_folder

_WIDEN = SHARED / "tools" / "widen.py"
_EMBEDDED = ROOT / "src" / "foredraft" / "embedded"
_EMBEDDED_SIZE = ("--hidden", "1024", "--layers", "24", "--intermediate", "4096", "--heads", "16")
_SMOLLM2_SIZE = ("--hidden", "2304", "--layers", "30", "--intermediate", "6144", "--heads", "36")
_SPECK = 1e-6


def build(name: str, folder: Path) -> None:
    """Build a checkpoint. It is complete or absent. Raises ValueError if the real model that it is made from was not fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / "target.new"
    shutil.rmtree(new, ignore_errors=True)
    _BUILDERS[name](new)
    if name == "embedded":
        shutil.copytree(_EMBEDDED / "draft", folder / "draft", dirs_exist_ok=True)
    new.rename(folder / "target")


def _embedded(folder: Path) -> None:
    _widen(_EMBEDDED / "target", folder, _EMBEDDED_SIZE)


def _smollm2(folder: Path) -> None:
    from benchmarks.peers.workers.dequantise import dequantise

    file = models_folder() / SMOLLM2.file
    if not file.exists():
        raise ValueError(f"{SMOLLM2.name} is not there: make models")
    dequantise(file, folder)


def _smollm2_wide(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as small:
        _smollm2(Path(small))
        _widen(Path(small), folder, _SMOLLM2_SIZE)


_BUILDERS: dict[str, Callable[[Path], None]] = {
    "embedded": _embedded,
    "smollm2": _smollm2,
    "smollm2-wide": _smollm2_wide,
}


def _widen(small: Path, big: Path, size: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, _WIDEN, small, big, *size], check=True)
    tell_apart(big / "model.safetensors")


def tell_apart(file: Path) -> None:
    """Make all all-zero matrices different from each other.

    The widened model's idle layers write zeros back. OpenVINO's converter stores equal constants only once, and would read a
    fifth fewer weights per pass than the other programs. So each gets one nonzero entry at its own place in the last row,
    which is padding that no real layer reads. It changes the residual stream there by about 1e-6, the logits by about 1e-8.
    """
    weights = load_file(file)
    blank = [weight for weight in weights.values() if weight.ndim == 2 and not weight.any()]
    for index, weight in enumerate(blank):
        weight[-1, index] = _SPECK
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(sys.argv[1], Path(sys.argv[2]))
