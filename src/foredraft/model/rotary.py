"""Tables of the angles of rotary embeddings."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Angles = Literal["halves", "pairs", "once"]
"""How the library lays out the cosines of a position: the whole list twice, each number twice in a row, or each once."""


@torch.inference_mode()
def rotation_table(
    hf: Any, num_positions: int, angles: Angles = "halves", layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [num_positions, rotary_dim / 2] float32 each. layer_type: the layers that the table is for, if the
    model has several tables."""
    positions = torch.arange(num_positions, device=hf.device)
    like = torch.zeros(1, device=hf.device)
    arguments = () if layer_type is None else (layer_type,)
    cos, sin = hf.model.rotary_emb(like, positions[None], *arguments)
    return _each_once(cos[0], angles), _each_once(sin[0], angles)


def _each_once(values: Tensor, angles: Angles) -> Tensor:
    if angles == "halves":
        values = values[:, : values.shape[1] // 2]
    elif angles == "pairs":
        values = values[:, ::2]
    return values.contiguous()


def pairs_as_halves(head_dim: int, rotary_dim: int) -> Tensor:
    """The permutation [D] that turns a head whose neighbours are rotated together into one whose halves are. Numbers after the rotated
    ones keep their places."""
    return torch.cat(
        [torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim)]
    )
