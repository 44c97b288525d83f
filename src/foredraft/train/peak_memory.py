"""Predicts the peak memory of a run before its first step. What training adds to the process is computed from shapes: the forward pass
runs on tensors without data, and the sizes of what it keeps for its gradient are added up. Tensors that live only for one operation
are not counted, so the prediction is slightly too low."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from foredraft.train.objectives import Objective, blocks_at_once
from foredraft.train.optimiser import Optimiser
from foredraft.utils.machine import ProcessMemory
from foredraft.utils.tensors import num_bytes

_LOGITS_AT_ONCE = 2
"""Copies of the last logits that exist besides those that are kept: the logits, and the lm_head's product before it is scaled."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Bytes. before: of the process before the first step, with target, student and texts; highest_before: its peak so far.
    gradients, optimiser: of the trained weights. activations: what a forward pass keeps for its gradient. logits: of the drafted
    tokens with their gradients, and the target's distributions."""

    before: int
    highest_before: int
    gradients: int
    optimiser: int
    activations: int
    logits: int

    @property
    def peak(self) -> int:
        """The peak of the process, including what it used before."""
        added = self.gradients + self.optimiser + self.activations + self.logits
        return max(self.highest_before, self.before + added)


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of one forward pass: see MemoryForecast. gradients: only those of the logits."""

    activations: int
    logits: int
    gradients: int


def forecast(memory: ProcessMemory, optimiser: Optimiser, of_pass: PassMemory) -> MemoryForecast:
    """memory: of this process, with everything loaded but the optimiser's state."""
    return MemoryForecast(
        before=memory.resident,
        highest_before=memory.highest,
        gradients=num_bytes(optimiser.parameters),
        optimiser=optimiser.state_bytes,
        activations=of_pass.activations,
        logits=of_pass.logits,
    )


def pass_memory(student: nn.Module, objective: Objective, shape: tuple[int, int]) -> PassMemory:
    """shape: [B, L], of the blocks. All of their tokens are assumed to be predicted."""
    kept: dict[int, torch.UntypedStorage] = {}
    logits: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):  # others, such as weights, have data, and exist already
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
        return tensor

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with saved_tensors_hooks(keep, _as_it_is):
            logits.extend(objective.shapes(student, torch.zeros(shape, dtype=torch.int64)))
        there_already = {storage._cdata for storage in mode.fake_tensor_converter.meta_converter.storage_memo.values()}
        activations = sum(storage.nbytes() for key, storage in kept.items() if key not in there_already)
        gradients, last = num_bytes(logits), logits[-1:]
        distributions = sum(each.numel() * torch.float32.itemsize for each in last)
        return PassMemory(activations, gradients + _LOGITS_AT_ONCE * num_bytes(last) + distributions, gradients)


def pass_shape(batch_size: int, context: int, logit_width: int) -> tuple[int, int]:
    """The shape [B, L] of the blocks that one pass reads. logit_width: logits per token."""
    return min(batch_size, blocks_at_once(context, logit_width)), context


def _as_it_is(saved: Any) -> Any:
    return saved
