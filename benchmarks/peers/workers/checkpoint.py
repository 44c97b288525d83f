"""The checkpoints from which all programs get their models, in bfloat16 and Hugging Face format. Needs torch.

    python -m benchmarks.peers.workers.checkpoint NAME FOLDER     writes FOLDER/target, and FOLDER/draft or FOLDER/head if there is one

* embedded: the embedded target widened until it costs what 0.4 billion parameters cost, the embedded draft, and the shipped head,
  widened for that target.
* smollm2: SmolLM2-135M-Instruct, dequantised from the file that `make models` fetches (four bits, so it differs a little
  from the published model), and the head that is shipped for it.
* smollm2-wide: the same, both widened, to about 1.8 billion parameters.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
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
    """Build what is not there yet. Each checkpoint is complete or absent. Raises ValueError if the real model that it is made from was
    not fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, make in _BUILDERS[name].items():
        if not (folder / part).exists():
            new = folder / f"{part}.new"
            shutil.rmtree(new, ignore_errors=True)
            make(new)
            new.rename(folder / part)


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


def _shipped(name: str) -> Callable[[Path], object]:
    return partial(shutil.copytree, _EMBEDDED / name)


def _embedded_head(folder: Path) -> None:
    _widen_head(_EMBEDDED / "head", _EMBEDDED / "target", folder)


def _smollm2_wide_head(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as small:
        _smollm2(Path(small))
        _widen_head(_EMBEDDED / "smollm2-head", Path(small), folder)


def _widen_head(head: Path, small_target: Path, folder: Path) -> None:
    """For the widened target beside `folder`."""
    parts = head, small_target, folder.parent / "target", folder
    subprocess.run([sys.executable, "-m", "benchmarks.common.wide_heads", *parts], check=True)


_BUILDERS: dict[str, dict[str, Callable[[Path], object]]] = {
    "embedded": {"target": _embedded, "draft": _shipped("draft"), "head": _embedded_head},
    "smollm2": {"target": _smollm2, "head": _shipped("smollm2-head")},
    "smollm2-wide": {"target": _smollm2_wide, "head": _smollm2_wide_head},
}
"""By model set: the folders, in this order, and what writes each."""


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
