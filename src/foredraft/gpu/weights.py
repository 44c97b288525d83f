"""The weights of a Llama-like decoder as laid out for a GPU: matrices with the same input are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Linear(NamedTuple):
    """weight: [n, k], contiguous. bias: [n] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """norms: input and post [hidden], query and key [D] or None. window: how many keys a query sees, its own included; 0:
    all."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    window: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters that all layers share. cos, sin: [positions, D / 2] float32."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class DeviceStack:
    """A whole decoder. embedding: [V, hidden]. final_norm: [hidden]."""

    layers: Sequence[DeviceLayer]
    embedding: Tensor
    final_norm: Tensor
    head: Linear
    shape: Shape
