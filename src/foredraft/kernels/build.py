"""Compiles kernels.cpp to a shared library in the user's cache folder, and again when the sources or the compiler change."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foredraft.utils.folders import can_write, is_ours, user_folders

SOURCES = Path(__file__).parent
_AVX512 = ("-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni")))
INSTRUCTIONS = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mf16c"),
}
"""The instruction sets that the kernels can be compiled for, fastest first, with the compiler's flags."""

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",  # a compiler that fuses a multiplication and an addition would change bits
    "-mfma",
)
_LONGEST_BUILD_S = 300


class BuildError(Exception):
    """There is no library. The text says why, in one line."""


def library(instructions: str, cache: Path | None = None) -> Path:
    """The compiled library, built if it is not in the cache. instructions: a key of INSTRUCTIONS. cache: the folder; None: the
    user's own.

    Raises BuildError if there is no compiler, if it fails, or if no cache folder can be written.
    """
    compiler = _compiler()
    flags = [*_FLAGS, *INSTRUCTIONS[instructions]]
    name = f"kernels-{_digest(compiler, flags)}.so"
    for folder in [cache] if cache is not None else user_folders():
        built = folder / name
        if is_ours(built):
            return built
        if can_write(folder):
            return _compiled(compiler, flags, built)
    raise BuildError("there is no writable folder for the compiled kernels: set XDG_CACHE_HOME to one")


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        compiler = shutil.which(name)
        if compiler is not None:
            return compiler
    raise BuildError("no C++ compiler was found: install g++, or set CXX")


def _digest(compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    sources = [path.read_bytes() for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])]
    return hashlib.sha256(b"\0".join([*sources, version, " ".join(flags).encode()])).hexdigest()[:16]


def _compiled(compiler: str, flags: Sequence[str], built: Path) -> Path:
    """Compile in a temporary folder and move the library into place, so that no process reads half of it."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", str(fresh)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_LONGEST_BUILD_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler} did not compile the kernels: {error}") from error
        if done.returncode != 0:
            complaints = [line for line in done.stderr.splitlines() if "error" in line] or ["no reason given"]
            raise BuildError(f"{compiler} cannot compile the kernels: {complaints[0]}")
        os.replace(fresh, built)
    return built
