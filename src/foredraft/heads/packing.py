"""Heads whose matrix products the compiled kernels compute, while PyTorch runs the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foredraft.kernels import Kernels, WeightFormat, WeightMemory
from foredraft.model.packed import NativeLinear, pack_linears


class RoundingLinear(NativeLinear):
    """NativeLinear for rows of any precision: they are rounded to bfloat16, and the result has their precision again."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]"""
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


def pack(module: nn.Module, kernels: Kernels, weight_format: WeightFormat) -> None:
    """Replace the linear layers in place by packed ones, with their weights in this format."""
    memory = WeightMemory()
    pack_linears(
        module, lambda source, bias: RoundingLinear(kernels.pack(source, bias, memory), kernels), weight_format
    )
