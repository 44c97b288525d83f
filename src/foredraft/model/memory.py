"""Check whether a model fits into the memory of its device, and move it there."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from pathlib import Path

import torch
from transformers import PreTrainedModel

from foredraft.errors import ModelError, one_line
from foredraft.model.pages import give_back
from foredraft.model.ranks import num_sharing_memory
from foredraft.model.stored import stored_experts, stored_linears
from foredraft.model.structure import find_layers

_FLOATING = ("F64", "F32", "F16", "BF16")
_LONGEST_HEADER = 100_000_000


def refuse_if_too_big(name: str, dtype: torch.dtype, device: torch.device, share: float = 1.0) -> None:
    """Raise ModelError if the weights of a local checkpoint in Hugging Face format need more memory than is free, before any is
    allocated. share: the fraction of the weights that this device gets."""
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    if files:
        refuse_more_than_free(name, round(sum(_loaded_size(file, dtype) for file in files) * share), device)


def refuse_more_than_free(name: str, needed: int, device: torch.device) -> None:
    """needed: size of the weights in bytes."""
    free = available_memory(device)
    if free is not None and needed > free:
        raise ModelError(
            f"{name}: its weights take {_gib(needed)} GiB, but only {_gib(free)} GiB of memory are free; "
            "use a smaller model or a smaller dtype"
        )


def refuse_if_dequantized_too_big(hf: PreTrainedModel, name: str, *, packs_linears: bool, packs_experts: bool) -> None:
    """Raise ModelError, before stored layers are read, if those that become floating point need more memory than is free.

    packs_linears, packs_experts: whether a body packs quantized linear layers, and experts, as they are.
    """
    free = available_memory(torch.device("cpu"))
    linears = [
        source for source in stored_linears(hf) if not packs_linears or isinstance(source.rows(0, 1), torch.Tensor)
    ]
    experts = [] if packs_experts else stored_experts(hf)
    needed = sum(prod(source.shape) for source in [*linears, *experts]) * hf.dtype.itemsize
    if free is not None and needed > free:
        raise ModelError(
            f"{name}: its quantized weights take {_gib(needed)} GiB in {str(hf.dtype).removeprefix('torch.')}, but only "
            f"{_gib(free)} GiB of memory are free; use a smaller model, or bfloat16 with compiled kernels"
        )


def _loaded_size(file: Path, dtype: torch.dtype) -> int:
    """Bytes of a safetensors file's tensors once they are loaded: floating-point ones in `dtype`, others as they are."""
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(header_size, _LONGEST_HEADER)))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            return sum(
                prod(entry["shape"]) * dtype.itemsize
                if entry["dtype"] in _FLOATING
                else entry["data_offsets"][1] - entry["data_offsets"][0]
                for entry in tensors
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return file.stat().st_size  # corrupt: the loader will say so


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"


def available_memory(device: torch.device) -> int | None:
    """Free bytes on a device, or None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return values[0] if values else None


def memory_for_layers(hf: PreTrainedModel) -> int | None:
    """Bytes free for keys and values, which are on the devices of their layers: over all devices, until the first is full. None where the
    system does not say."""
    num_layers = layers_by_device(hf)
    free = [(available_memory(device), num) for device, num in num_layers.items()]
    enough = [num_bytes * num_layers.total() // num for num_bytes, num in free if num_bytes is not None]
    return min(enough) // num_sharing_memory(hf) if len(enough) == len(free) else None


def layers_by_device(hf: PreTrainedModel) -> Counter[torch.device]:
    """How many of a decoder's layers are on each device."""
    parameters = (next(layer.parameters(), None) for layer in find_layers(hf) or [hf])
    return Counter(hf.device if parameter is None else parameter.device for parameter in parameters)


def is_spread(hf: PreTrainedModel) -> bool:
    """Whether a device map puts parts of the model on different devices."""
    return len(set((getattr(hf, "hf_device_map", None) or {}).values())) > 1


def float16_to_bfloat16(hf: PreTrainedModel) -> None:
    """Convert in place, one parameter at a time. If the library converted while loading, the model and its mapped file would be in memory
    together."""
    for parameter in hf.parameters():
        if parameter.dtype == torch.float16:
            original = parameter.data
            parameter.data = original.to(torch.bfloat16)
            give_back([original])
    hf.config.dtype = torch.bfloat16


def move(hf: PreTrainedModel, device: torch.device) -> None:
    """Raises ModelError for a device that does not exist or has no room."""
    try:
        hf.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device} cannot be used: {one_line(error)}") from error
