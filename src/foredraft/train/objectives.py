"""From blocks to a loss: the student's pass, and the target's if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.errors import ForedraftError
from foredraft.train.blocks import IGNORED, Blocks
from foredraft.train.losses import LossSums, distillation_loss, next_token_loss
from foredraft.utils.arguments import check_autocast

LOSSES = ("tv", "kl", "kl+tv")
_MAX_LOGITS = 1 << 23
"""Logits of a pass. More blocks are read in several passes, so memory does not grow with the batch."""


def check_loss(loss: str) -> None:
    """Raises ForedraftError for one that is not known."""
    if loss not in LOSSES:
        raise ForedraftError(f"--loss must be one of {', '.join(LOSSES)}, not {loss!r}")


def kl_share(loss: str, kl_until: float, progress: float) -> float:
    """How much of a loss is KL; the rest is total variation. See Distillation."""
    if loss != "kl+tv":
        return float(loss == "kl")
    return max(0.0, 1 - progress / kl_until) if kl_until else 0.0


class Objective(Protocol):
    """What a step minimises. student (of the kind that the objective is for), ids [B, L], next_ids [B, L] -> sums over the
    positions that have a next token"""

    def __call__(self, student: Any, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums: ...


@dataclass(frozen=True, slots=True)
class NextToken:
    """Plain next-token loss. dtype: of autocast, None for none."""

    dtype: torch.dtype | None = None

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        mask = next_ids != IGNORED
        return next_token_loss(_logits(student, ids, mask, self.dtype), next_ids[mask])


@dataclass(frozen=True, slots=True)
class Distillation:
    """The target's distribution at a temperature. loss: "tv", "kl", or "kl+tv", which moves from KL to total variation: far
    from the target the gradient of total variation is weak. kl_until: the share of the run in which KL's weight falls to 0.
    dtype: of autocast, None for none."""

    target: PreTrainedModel
    loss: str = "kl+tv"
    temperature: float = 1.0
    kl_until: float = 0.5
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        mask = next_ids != IGNORED
        with torch.no_grad():
            target_logits = _logits(self.target, ids, mask, self.dtype)
        logits = _logits(student, ids, mask, self.dtype)
        width = min(logits.shape[1], target_logits.shape[1])  # the wider one is padded
        share = kl_share(self.loss, self.kl_until, progress)
        return distillation_loss(logits[:, :width], target_logits[:, :width], self.temperature, share)


def _logits(model: PreTrainedModel, ids: Tensor, mask: Tensor, dtype: torch.dtype | None) -> Tensor:
    """ids, mask: [B, L] -> [R, V], of the positions in the mask"""
    with _autocast(dtype, ids.device):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.flatten(0, 1) if bool(mask.all()) else logits[mask]


def _autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def autocast_dtype(name: str) -> torch.dtype | None:
    """None for "float32": weights are float32 already. Raises ForedraftError for an unknown name."""
    check_autocast(name)
    return None if name == "float32" else torch.bfloat16


def micro_batches(num_blocks: int, length: int, vocab_size: int) -> Iterator[slice]:
    """Slices of a batch that fit the memory of one pass."""
    size = max(1, _MAX_LOGITS // (length * vocab_size))
    for start in range(0, num_blocks, size):
        yield slice(start, min(start + size, num_blocks))


def device_of(student: nn.Module) -> torch.device:
    """Where its weights are."""
    return next(student.parameters()).device


def measure(objective: Objective, student: nn.Module, blocks: Blocks, progress: float) -> LossSums:
    """The sums over the blocks, read one by one, without a gradient."""
    parts = []
    with torch.no_grad():
        for index in range(len(blocks)):
            block = blocks.select([index])
            ids, next_ids = (part.long().to(device_of(student)) for part in (block.ids, block.next_ids))
            parts.append(objective(student, ids, next_ids, progress))
    return total(parts)


def total(parts: Sequence[LossSums]) -> LossSums:
    """Without a gradient."""
    return LossSums(
        torch.stack([part.loss.detach() for part in parts]).sum(),
        sum(part.acceptance for part in parts),
        sum(part.agreement for part in parts),
        sum(part.num_rows for part in parts),
    )
