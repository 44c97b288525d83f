"""The machine and the library versions that a measurement must state."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

_CPU_INFO, _STATUS = Path("/proc/cpuinfo"), Path("/proc/self/status")
_OF_MEMORY = ("VmRSS", "VmHWM")
_CPU_FEATURES = ("avx2", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "sve", "sve2")


@dataclass(frozen=True, slots=True)
class MachineReport:
    """cpu_features: those that matter for low precision. gpus: by name."""

    processor: str
    cpu_capability: str
    cpu_features: list[str]
    num_threads: int
    gpus: list[str]
    python: str
    torch: str
    transformers: str


def this_machine() -> MachineReport:
    return MachineReport(
        processor=_processor(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cpu_features=cpu_features(),
        num_threads=torch.get_num_threads(),
        gpus=[torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=str(transformers.__version__),
    )


def cpu_features() -> list[str]:
    """The features that matter for low precision; none if torch does not report them."""
    # older releases do not have get_capabilities
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)() or {}
    return [feature for feature in _CPU_FEATURES if capabilities.get(feature)]


def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 instructions. Without them PyTorch's products take several times as long as in float32."""
    return any("bf16" in feature for feature in cpu_features())


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The resident memory of this process in bytes, including mapped files: now, and its maximum so far."""

    resident: int
    highest: int


def process_memory() -> ProcessMemory | None:
    """None if the system does not report it."""
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    values = {
        name: int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name in _OF_MEMORY
    }
    return ProcessMemory(*(values[name] for name in _OF_MEMORY)) if len(values) == len(_OF_MEMORY) else None


def _processor() -> str:
    """The processor's name, from Linux if possible, else from Python."""
    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
