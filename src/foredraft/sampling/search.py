"""The largest of each row: by the compiled kernels where there are any, else through block maxima, which is one
vectorised pass over the row and a look into few blocks. PyTorch's own argmax and topk walk a row of 151,936 numbers one by
one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.kernels import Kernels, load_kernels

_ARGMAX_BLOCK = 512
_TOP_BLOCK = 64
_WORTH_IT = 4096


def argmax_rows(x: Tensor) -> Tensor:
    """The first place of each row's largest number (of NaN, if it has one). x: [R, V] -> [R]"""
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
    # the tail is shorter than a block: read its last block whole, from further left
    start = (block * _ARGMAX_BLOCK).clamp(max=width - _ARGMAX_BLOCK)
    columns = start[:, None] + torch.arange(_ARGMAX_BLOCK, device=x.device)
    return start + x.gather(1, columns).argmax(-1)


def kernels_for(x: Tensor) -> Kernels | None:
    """Ours read bfloat16 and float32 on the CPU, and give the same numbers for both."""
    return load_kernels() if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) else None


def top_rows(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's `count` largest numbers, largest first, and their places. x: [R, V] -> [R, count], [R, count]

    Among equals at the border any may be taken, but always the same for the same row.
    """
    num_rows, width = x.shape
    if width < _WORTH_IT or count * _TOP_BLOCK > width // 2:
        values, ids = x.topk(count, dim=-1)
        return values, ids
    blocks, tail = _blocks(x, _TOP_BLOCK)
    chosen = blocks.amax(-1).topk(count, dim=-1).indices
    columns = (chosen[..., None] * _TOP_BLOCK + torch.arange(_TOP_BLOCK, device=x.device)).reshape(num_rows, -1)
    if tail.shape[1]:
        last = torch.arange(width - tail.shape[1], width, device=x.device).expand(num_rows, -1)
        columns = torch.cat([columns, last], dim=1)
    values, places = x.gather(1, columns).topk(count, dim=-1)
    return values, columns.gather(1, places)


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[R, V] -> whole blocks [R, V // size, size] and what is left [R, V % size]."""
    whole = x.shape[1] // size * size
    return x[:, :whole].reshape(x.shape[0], -1, size), x[:, whole:]
