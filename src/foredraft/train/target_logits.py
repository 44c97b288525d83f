"""The logits of a target, computed from its states with gradients: packed matrices have none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.heads import TargetEnds
from foredraft.model import LanguageModel


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """The lm_head of a target, for all ids or some. weight: [D, H]. bias: [D]. softcap: logits stay below this magnitude; 0: there is
    no cap."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0

    @classmethod
    def of(cls, target: LanguageModel, ids: Tensor | None = None) -> TargetLogits:
        """ids: [D] of the target's vocabulary; None: all."""
        ends = TargetEnds(target.hf)
        bias = ends.lm_head_bias(ids)
        scaled = None if bias is None else bias * ends.logit_scale
        return cls(ends.lm_head_rows(ids).mul_(ends.logit_scale), scaled, ends.logit_softcap)

    def __call__(self, states: Tensor) -> Tensor:
        """states: [R, H], what the lm_head reads -> logits [R, D]"""
        logits = torch.nn.functional.linear(states, self.weight, self.bias)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits
