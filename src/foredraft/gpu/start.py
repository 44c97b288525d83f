"""Check whether the kernels run on a device, by running some before they are used."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from foredraft.errors import one_line
from foredraft.gpu.weights import Linear

_FIRST_WITH_BFLOAT16 = (8, 0)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run on this device, in one line; None if they do."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability(device) < _FIRST_WITH_BFLOAT16
    ):
        return "it does not support bfloat16 products"
    try:
        from foredraft.gpu import kernels

        with on(device):
            x = torch.ones(1, 32, dtype=dtype, device=device)
            kernels.gated(x)
            kernels.linear(x, Linear(x), kernels.ANY_ROWS).cpu()  # needs the most shared memory
    except Exception as error:  # a missing compiler, a driver that is too old: whatever Triton says
        return one_line(error)
    return None


def on(device: torch.device) -> torch.cuda.device:
    """Make a device current, for kernels and events. A CPU leaves the current device as it is."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
