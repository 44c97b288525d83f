"""How checkpoints are loaded: dtype, device, quantization, kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from foredraft.errors import ForedraftError, ModelError
from foredraft.model.ranks import this_world
from foredraft.utils import arguments

logger = logging.getLogger("foredraft")

DTYPES = {name: getattr(torch, name) for name in arguments.DTYPES}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How checkpoints are loaded. dtype "auto": the checkpoint's own. device "auto": CUDA if there is one.

    quantization: "int8" rounds linear layers to eight bits while they are loaded, "int4" all but the head to four bits, "int4-all" the
    head too; the rest runs in bfloat16. None or "none" leaves the weights as they are. kernels: "auto" uses compiled kernels where they
    are available, "torch" never does. batch_invariant: on a GPU, use products that compute each row independently, so that a text never
    depends on the batch or on drafts; compiled kernels on a CPU always do.

    device_map: as in transformers, to spread the layers over devices: "auto", or a device for each module. tp_plan: "auto" splits each
    layer among the processes that torchrun started (see tensor_parallel.py).
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    kernels: str = "auto"
    batch_invariant: bool = False
    device_map: str | Mapping[str, int | str] | None = None
    tp_plan: str | None = None

    def __post_init__(self) -> None:
        if self.quantization not in (None, *arguments.QUANTIZATIONS):
            raise ModelError(
                f"quantization must be one of {', '.join(arguments.QUANTIZATIONS)}, not {self.quantization!r}"
            )
        if self.kernels not in ("auto", "torch"):
            raise ModelError(f'kernels must be "auto" or "torch", not {self.kernels!r}')
        try:
            arguments.check_devices(str(self.device), self.device_map, self.tp_plan, self.quantization)
        except ForedraftError as error:
            raise ModelError(str(error)) from None

    @property
    def is_rounded(self) -> bool:
        """Whether the weights are to be rounded while they are loaded."""
        return arguments.rounds(self.quantization)

    def torch_device(self) -> torch.device:
        """Raises ModelError for an invalid name, and for a device that does not exist."""
        if self.tp_plan is not None:
            return this_world().device
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ModelError(f"device must be auto, cpu, cuda or cuda:N, not {self.device!r}") from error
        _refuse_absent(device)
        return device

    def torch_dtype(self, config: PretrainedConfig) -> torch.dtype:
        """The dtype to load in. Raises ModelError for an invalid name."""
        dtype = self.dtype
        if isinstance(dtype, str) and dtype != "auto":
            if dtype not in DTYPES:
                raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
            dtype = DTYPES[dtype]
        if dtype == "auto":
            dtype = getattr(config.get_text_config(), "dtype", None) or torch.float32
        if dtype == torch.float16 and self.torch_device().type == "cpu":
            logger.warning("float16 is slow on a CPU and has a narrow range: loading in bfloat16")
            dtype = torch.bfloat16
        if not isinstance(dtype, torch.dtype):
            raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
        return dtype


def _refuse_absent(device: torch.device) -> None:
    if device.type == "meta":
        raise ModelError("device meta holds no data: give auto, cpu, cuda or cuda:N")
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise ModelError(f"device {device} cannot be used: PyTorch finds no CUDA device here; give cpu, or auto")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(
            f"device {device} cannot be used: the number of CUDA devices is {torch.cuda.device_count()}, counted from cuda:0"
        )
