"""From blocks to a loss: the student's pass, the target's beside it where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ForedraftError
from foredraft.train.blocks import NOTHING
from foredraft.train.losses import Measure, distilled, next_token
from foredraft.utils.arguments import check_autocast

LOSSES = ("tv", "kl", "kl+tv")
_LOGITS = 1 << 23
"""Logits of a pass: more blocks are read one pass after the other, so memory does not grow with the batch."""


class Objective(Protocol):
    """What a step minimises. student, ids [B, L], following [B, L] -> sums over the places that something follows."""

    def __call__(self, student: PreTrainedModel, ids: Tensor, following: Tensor, progress: float) -> Measure: ...


@dataclass(frozen=True, slots=True)
class NextToken:
    """Plain next-token loss. dtype: of autocast, None for none."""

    dtype: torch.dtype | None = None

    def __call__(self, student: PreTrainedModel, ids: Tensor, following: Tensor, progress: float) -> Measure:
        counts = following != NOTHING
        return next_token(_logits(student, ids, counts, self.dtype), following[counts])


@dataclass(frozen=True, slots=True)
class Distillation:
    """The target's law at a temperature. loss: "tv", "kl", or "kl+tv", which begins as KL and ends as total variation: far
    from the target the latter hardly says which way to go. kl_until: the share of the run in which KL's share falls to 0.
    dtype: of autocast, None for none."""

    target: PreTrainedModel
    loss: str = "kl+tv"
    temperature: float = 1.0
    kl_until: float = 0.5
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ForedraftError(f"--loss must be one of {', '.join(LOSSES)}, not {self.loss!r}")

    def kl_share(self, progress: float) -> float:
        if self.loss != "kl+tv":
            return float(self.loss == "kl")
        return max(0.0, 1 - progress / self.kl_until) if self.kl_until else 0.0

    def __call__(self, student: PreTrainedModel, ids: Tensor, following: Tensor, progress: float) -> Measure:
        counts = following != NOTHING
        with torch.no_grad():
            theirs = _logits(self.target, ids, counts, self.dtype)
        ours = _logits(student, ids, counts, self.dtype)
        width = min(ours.shape[1], theirs.shape[1])  # what one of them has more is padding
        return distilled(ours[:, :width], theirs[:, :width], self.temperature, self.kl_share(progress))


def _logits(model: PreTrainedModel, ids: Tensor, counts: Tensor, dtype: torch.dtype | None) -> Tensor:
    """[B, L] -> [R, V], the places that count."""
    with _autocast(dtype, ids.device):
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found.flatten(0, 1) if bool(counts.all()) else found[counts]


def _autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def autocast_dtype(name: str) -> torch.dtype | None:
    """None: weights are in float32, so there is nothing to cast. Raises ForedraftError for a name that is none."""
    check_autocast(name)
    return None if name == "float32" else torch.bfloat16


def passes(num_blocks: int, length: int, vocab_size: int) -> Iterator[slice]:
    """The blocks of a batch, as many at a time as memory is meant for."""
    size = max(1, _LOGITS // (length * vocab_size))
    for start in range(0, num_blocks, size):
        yield slice(start, min(start + size, num_blocks))


def measure_on(
    objective: Objective, student: PreTrainedModel, blocks: Sequence[tuple[Tensor, Tensor]], progress: float
) -> Measure:
    """The sums over blocks (ids [L], following [L]), without a gradient."""
    found = []
    with torch.no_grad():
        for ids, following in blocks:
            block, after = (part[None].long().to(student.device) for part in (ids, following))
            found.append(objective(student, block, after, progress))
    return added(found)


def added(parts: Sequence[Measure]) -> Measure:
    return Measure(
        torch.stack([part.loss.detach() for part in parts]).sum(),
        sum(part.acceptance for part in parts),
        sum(part.agreement for part in parts),
        sum(part.num_rows for part in parts),
    )
