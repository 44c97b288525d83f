"""Muon for the matrices and AdamW for the rest, as one optimiser, and their learning rates over a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError
from foredraft.train.muon import Muon
from foredraft.utils.tensors import num_bytes

OPTIMISERS = ("muon", "adamw")
_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class LearningRates:
    """matrices: the rate of Muon. others: the rate of AdamW. warm_up: the share of the run in which the rates rise to these
    values. Then they fall linearly to 0."""

    matrices: float = 0.02
    others: float = 0.002
    warm_up: float = 0.02

    def factor(self, progress: float) -> float:
        """The current factor of both rates. progress: of the run, 0 to 1."""
        if progress < self.warm_up:
            return max(progress / self.warm_up, 0.01)
        return max((1 - progress) / (1 - self.warm_up), 0.0) if self.warm_up < 1 else 1.0


FINE_TUNING = LearningRates(0.005, 0.0006)
"""For a fully trained model. Higher rates damage it, and a short run does not repair that."""


class Optimiser:
    """name: "muon" gives two-dimensional weights of the layers to Muon and the rest (embeddings, lm_head, norms, biases) to
    AdamW; "adamw" gives everything to AdamW. clip: the largest norm of the gradient. dtype: of Muon's products."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        rates: LearningRates,
        clip: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if name not in OPTIMISERS:
            raise ForedraftError(f"--optimiser must be one of {', '.join(OPTIMISERS)}, not {name!r}")
        self._rates, self._clip = rates, clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._matrices = _matrices(model) if name == "muon" else []
        ids = {id(p) for p in self._matrices}
        self._others = [p for p in self.parameters if id(p) not in ids]
        self._optimisers: list[tuple[torch.optim.Optimizer, float]] = []
        if self._matrices:
            self._optimisers.append((Muon(self._matrices, lr=rates.matrices, dtype=dtype), rates.matrices))
        if self._others:
            adam = torch.optim.AdamW(self._others, lr=rates.others, betas=(0.9, 0.95), weight_decay=0.0)
            self._optimisers.append((adam, rates.others))

    @property
    def state_bytes(self) -> int:
        """The size of its state after the first step: for Muon one momentum per matrix; for AdamW two moments per weight, and the
        number of steps."""
        return num_bytes(self._matrices) + 2 * num_bytes(self._others) + len(self._others) * _COUNTER_BYTES

    def clip_gradients(self) -> float:
        """-> the gradient's norm before clipping"""
        return float(nn.utils.clip_grad_norm_(self.parameters, self._clip))

    def step(self, progress: float) -> None:
        """Update the weights and drop the gradients."""
        factor = self._rates.factor(progress)
        for optimiser, rate in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimiser.state_dict() for optimiser, _ in self._optimisers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for (optimiser, _), state in zip(self._optimisers, states, strict=True):
            optimiser.load_state_dict(state)


def _matrices(model: nn.Module) -> list[Tensor]:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    get_head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))
    lm_heads = [get_head(), *getattr(model, "lm_heads", ())]
    tables |= {id(head.weight) for head in lm_heads if head is not None}
    return [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in tables]
