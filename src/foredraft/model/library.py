"""A model run by the library's own code, with our attention, our experts and our linear layers inside."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.kernels import Kernels
from foredraft.model.attention import Pass, Span
from foredraft.model.demand import Demand
from foredraft.model.routing import route, routed
from foredraft.model.rows import rule_of


class LibraryBody:
    """hf stays as its owner made it. kernels: for attention; None: PyTorch's."""

    is_batch_invariant = False

    def __init__(self, hf: PreTrainedModel, kernels: Kernels | None = None) -> None:
        self._hf = hf
        self.kernels = kernels
        self.row_rule = rule_of(hf)
        self._is_taken_over = False
        self._keeps_rows = "logits_to_keep" in inspect.signature(hf.forward).parameters

    def __call__(self, ids: list[int], positions: list[int], wanted: list[int], spans: Sequence[Span]) -> Tensor:
        """-> logits [len(wanted), V]"""
        rows = wanted + [0] * (self.row_rule.pad(len(wanted)) - len(wanted))
        device = self._hf.device
        index = torch.tensor(rows, device=device)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=device),
            "position_ids": torch.tensor([positions], device=device),
            # without it the library would take the ragged batch for packed training sequences
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool, device=device),
            "use_cache": False,
            "reading": Pass(list(spans), self.kernels),
        }
        if self._keeps_rows:
            inputs["logits_to_keep"] = index
        with nullcontext() if self._is_taken_over else routed(self._hf):
            logits: Tensor = self._hf(**inputs).logits[0]
        if not self._keeps_rows:
            logits = logits[index]
        return logits[: len(wanted)]

    def take_over(self) -> None:
        """The model stays routed, which spares every pass the way there and back."""
        route(self._hf)
        self._is_taken_over = True

    def warm_up(self, demand: Demand) -> None:
        """It needs nothing."""
