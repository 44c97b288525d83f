"""The modules that follow the first layers of a target with an early exit, in plain PyTorch."""

from __future__ import annotations

import copy

from torch import Tensor, nn


class ExitAdapter(nn.Module):
    """A norm and a gated MLP, whose output is added to its input (arXiv:2404.18911 has a layer of attention there). norm: of the target's
    form."""

    def __init__(self, norm: nn.Module, hidden_size: int, size: int) -> None:
        super().__init__()
        self.norm = norm
        self.gate_proj = nn.Linear(hidden_size, size, bias=False)
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., H]"""
        normalized = self.norm(x)
        out: Tensor = x + self.down_proj(nn.functional.silu(self.gate_proj(normalized)) * self.up_proj(normalized))
        return out


class Exit(nn.Module):
    """The modules between a layer's output and the target's lm_head. norm: the target's final norm, of which copies are made.
    adapter_size: the width of the adapter's MLP; 0: there is no adapter."""

    def __init__(self, norm: nn.Module, hidden_size: int, adapter_size: int) -> None:
        super().__init__()
        self.norm = copy.deepcopy(norm)
        self.adapter = ExitAdapter(copy.deepcopy(norm), hidden_size, adapter_size) if adapter_size else None

    def forward(self, x: Tensor) -> Tensor:
        """Output of a layer [.., H] -> input of the lm_head [.., H]"""
        out: Tensor = self.norm(x if self.adapter is None else self.adapter(x))
        return out
