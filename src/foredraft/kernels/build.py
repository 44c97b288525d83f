"""From kernels.cpp to a shared library in the user's cache folder; compiled again when the source or the compiler changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from foredraft.folders import can_write, is_ours, user_folders

SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",  # sums are written as they are meant: a compiler that fuses some would change bits
    *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni")),
    "-mfma",
)
_LONGEST_BUILD_S = 300


class BuildError(Exception):
    """In one line, why there is no library."""


def library(cache: Path | None = None) -> Path:
    """The compiled library, built if it is not in the cache. cache: the folder; None: the user's own.

    Raises BuildError where there is no compiler, or where it fails.
    """
    compiler = _compiler()
    name = f"kernels-{_digest(compiler)}.so"
    for folder in [cache] if cache is not None else user_folders():
        built = folder / name
        if is_ours(built):
            return built
        if can_write(folder):
            return _compiled(compiler, built)
    raise BuildError("no folder to keep the compiled kernels in: set XDG_CACHE_HOME to one that can be written")


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError("no C++ compiler was found: install g++, or set CXX")


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(b"\0".join([SOURCE.read_bytes(), version, " ".join(_FLAGS).encode()])).hexdigest()[:16]


def _compiled(compiler: str, built: Path) -> Path:
    """Written beside and moved into place: processes that start together do not read half a library."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        fresh = Path(folder) / built.name
        command = [compiler, *_FLAGS, str(SOURCE), "-o", str(fresh)]
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
