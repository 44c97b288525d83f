"""The angles of rotary embeddings, as tables."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Angles = Literal["halves", "pairs", "once"]
"""How the library lays the cosines of a position out: all and all again, each twice, or each once."""


@torch.inference_mode()
def rotation_table(
    hf: Any, num_positions: int, angles: Angles = "halves", layer_type: str | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [num_positions, rotary_dim / 2] float32 each. layer_type: of which layers, where the
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
    """The order in which a head whose neighbours are rotated together becomes one whose halves are: [D]. What follows the
    rotated numbers stays where it is."""
    return torch.cat(
        [torch.arange(0, rotary_dim, 2), torch.arange(1, rotary_dim, 2), torch.arange(rotary_dim, head_dim)]
    )
