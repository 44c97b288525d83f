"""The largest numbers of each row, found by the compiled kernels where they are available, else by block maxima: one vectorised pass
over the row, then a search in a few blocks. PyTorch's own argmax and topk walk a row of 151,936 numbers one by one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from foredraft.gpu.start import on, why_not
from foredraft.kernels import Kernels, load_kernels

_ARGMAX_BLOCK = 512
_TOP_BLOCK = 64
_WORTH_IT = 4096


def argmax_rows(x: Tensor) -> Tensor:
    """The first index of each row's largest number (of NaN, if it has one). x: [R, V] -> [R]"""
    kernels = kernels_for(x)
    if kernels is not None:
        return kernels.argmax(x)
    width = x.shape[1]
    if width < _WORTH_IT:
        return x.argmax(-1)
    blocks, tail = _blocks(x, _ARGMAX_BLOCK)
    best = blocks.amax(-1)
    if tail.shape[1]:
        best = torch.cat([best, tail.amax(-1, keepdim=True)], dim=1)
    block = best.argmax(-1)
    # the tail is shorter than a block: read a whole block that ends where the row ends
    start = (block * _ARGMAX_BLOCK).clamp(max=width - _ARGMAX_BLOCK)
    columns = start[:, None] + torch.arange(_ARGMAX_BLOCK, device=x.device)
    return start + x.gather(1, columns).argmax(-1)


def kernels_for(x: Tensor) -> Kernels | None:
    """The compiled kernels, if they can read x: bfloat16 or float32 on the CPU, with the same results for both."""
    return load_kernels() if x.is_cpu and x.dtype in (torch.bfloat16, torch.float32) else None


def top_two_on_device(x: Tensor) -> Tensor | None:
    """The tokens of greedy rows in one or two launches, where the GPU's kernels run; None elsewhere. x: [R, V] -> see gpu.rows.top_two"""
    if x.device.type != "cuda" or x.dtype == torch.float64 or not _has_gpu_kernels(x.device):
        return None
    from foredraft.gpu.rows import top_two  # needs Triton

    with on(x.device):
        return top_two(x)


@cache
def _has_gpu_kernels(device: torch.device) -> bool:
    return why_not(device, torch.float32) is None


def top_rows(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's `count` largest numbers (NaN counts as largest), in descending order, equal ones in order of index, and their indices.
    x: [R, V] -> [R, count], [R, count]"""
    num_rows, width = x.shape
    columns = torch.arange(width, device=x.device).expand(num_rows, -1)
    if width < _WORTH_IT or count * _TOP_BLOCK > width // 2:
        return _first_of_largest(x, columns, count)
    blocks, tail = _blocks(x, _TOP_BLOCK)
    # a number outside these blocks has `count` numbers before it, one in each block
    _, chosen = _first_of_largest(blocks.amax(-1), columns[:, : blocks.shape[1]], count)
    places = (chosen[..., None] * _TOP_BLOCK + torch.arange(_TOP_BLOCK, device=x.device)).reshape(num_rows, -1)
    if tail.shape[1]:
        places = torch.cat([places, columns[:, width - tail.shape[1] :]], dim=1)
    return _first_of_largest(x.gather(1, places), places, count)


def _first_of_largest(x: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As top_rows, for numbers x [R, N] at the indices places [R, N], which differ."""
    if x.dtype == torch.float64:
        order = places.argsort(dim=-1)  # the stable sort below then keeps equal numbers in order of index
        values, ranks = x.gather(1, order).sort(dim=-1, descending=True, stable=True)
        return values[:, :count], places.gather(1, order).gather(1, ranks[:, :count])
    chosen = _keys(x.float(), places).topk(count, dim=-1).indices
    return x.gather(1, chosen), places.gather(1, chosen)


def _keys(x: Tensor, places: Tensor) -> Tensor:
    """Distinct integers that sort by number, then by index. x: float32"""
    bits = (
        (x + 0.0).masked_fill(x.isnan(), torch.nan).view(torch.int32).to(torch.int64)
    )  # -0 becomes 0, any NaN the positive one
    return (torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32) - places


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[R, V] -> whole blocks [R, V // size, size] and the rest [R, V % size]"""
    whole = x.shape[1] // size * size
    return x[:, :whole].reshape(x.shape[0], -1, size), x[:, whole:]
