"""Computes losses on blocks: runs the student, and the target if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.model import LoadOptions
from foredraft.train.blocks import IGNORED, Blocks
from foredraft.train.losses import DistillationLoss, LossSums, next_token_loss
from foredraft.utils.arguments import check_autocast
from foredraft.utils.machine import multiplies_bfloat16

_MAX_LOGITS = 1 << 23
"""The most logits of a pass. Larger batches are read in several passes, so memory does not grow with the batch."""
_ROWS_STEP = 8
"""Passes over short blocks read a multiple of this many, because CPU libraries compile a matrix product for every shape."""


class Objective(Protocol):
    """What a step minimises. student (of the kind that the objective is for), ids [B, L], next_ids [B, L], progress -> sums over
    the positions that have a next token"""

    def __call__(self, student: Any, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums: ...

    def shapes(self, student: Any, ids: Tensor) -> Iterator[Tensor]:
        """Only the student's part of a call: the logits [N, V] that it computes, one drafted token after the other, if all tokens
        are predicted. The tensors have shapes but no data (see peak_memory.py)."""


class BlockReader(Protocol):
    """How a model reads blocks. predicted_share: the largest share of a block's positions that can have a next token."""

    @property
    def predicted_share(self) -> float: ...

    def __call__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
        """ids, mask: [B, L] -> logits [R, V] at the positions in the mask"""

    def all_logits(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """ids: [B, L] -> logits [N, V] at all positions that may have a next token"""


class TextReader:
    """Reads blocks of text with a decoder-only model."""

    predicted_share = 1.0

    def __call__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
        """See BlockReader."""
        logits = self.all_logits(model, ids)
        return logits if bool(mask.all()) else logits[mask.flatten()]

    def all_logits(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """See BlockReader."""
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class NextToken:
    """Plain next-token loss."""

    read: BlockReader

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        mask = next_ids != IGNORED
        return next_token_loss(self.read(student, ids, mask), next_ids[mask])

    def shapes(self, student: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        yield self.read.all_logits(student, ids)


@dataclass(frozen=True, slots=True)
class Distillation:
    """Distillation from the target's distribution."""

    target: PreTrainedModel
    loss: DistillationLoss
    read: BlockReader

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        mask = next_ids != IGNORED
        with torch.no_grad():
            target_logits = self.read(self.target, ids, mask)
        logits = self.read(student, ids, mask)
        width = min(logits.shape[1], target_logits.shape[1])  # the wider one is padded
        return self.loss(logits[:, :width], self.loss.distribution(target_logits[:, :width]), progress)

    def shapes(self, student: PreTrainedModel, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        yield self.read.all_logits(student, ids)


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """An objective whose matrix products are computed in another precision than that of the weights."""

    objective: Objective
    dtype: torch.dtype

    def __call__(self, student: Any, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        with torch.autocast(ids.device.type, self.dtype):
            return self.objective(student, ids, next_ids, progress)

    def shapes(self, student: Any, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        with torch.autocast(ids.device.type, self.dtype):
            yield from self.objective.shapes(student, ids)


def in_precision(objective: Objective, name: str) -> Objective:
    """name: "float32", like the weights, or "bfloat16", for mixed precision. Raises ForedraftError for any other."""
    check_autocast(name)
    return objective if name == "float32" else MixedPrecision(objective, torch.bfloat16)


def fastest_autocast(device: str) -> str:
    """The faster precision on a device: bfloat16 if it has instructions for it, otherwise float32, in which a step is then many times
    faster. device: as in LoadOptions."""
    where = LoadOptions(device=device).torch_device()
    is_on_gpu = where.type == "cuda"
    multiplies = torch.cuda.is_bf16_supported(including_emulation=False) if is_on_gpu else multiplies_bfloat16()
    return "bfloat16" if multiplies else "float32"


def micro_batches(ids: Tensor, logit_width: int) -> Iterator[list[int]]:
    """The rows of a batch of blocks, in pieces that fit the memory of one pass, with blocks of similar length together. ids: [B, L],
    with IGNORED where a block ends early: no pass reads positions that none of its blocks has. logit_width: logits per token."""
    used = ids != IGNORED
    rest = used.sum(1).argsort(descending=True, stable=True)
    while len(rest):
        num_places = used[rest].cumsum(0).count_nonzero(dim=1).tolist()  # of the first 1, 2, 3, ... blocks together
        size = sum(n <= blocks_at_once(length, logit_width) for n, length in enumerate(num_places, 1))
        if _ROWS_STEP < size < len(rest):
            size -= size % _ROWS_STEP
        yield rest[:size].tolist()
        rest = rest[size:]


def blocks_at_once(length: int, vocab_size: int) -> int:
    """How many blocks one pass reads. length: of a block. vocab_size: logits per token."""
    return max(1, _MAX_LOGITS // (length * vocab_size))


def device_of(student: nn.Module) -> torch.device:
    """The device of the student's weights."""
    return next(student.parameters()).device


def measure(
    objective: Objective,
    student: nn.Module,
    blocks: Blocks,
    progress: float,
    on_share: Callable[[float], None] = lambda _: None,
) -> LossSums:
    """The sums over the blocks, read one by one, without a gradient. on_share: called with the share that is read, after each."""
    parts = []
    with torch.no_grad():
        for index in range(len(blocks)):
            block = blocks.select([index])
            ids, next_ids = (part.long().to(device_of(student)) for part in (block.ids, block.next_ids))
            parts.append(objective(student, ids, next_ids, progress))
            on_share((index + 1) / len(blocks))
    return total(parts)


def total(parts: Sequence[LossSums]) -> LossSums:
    """The sums over all parts, without a gradient."""
    return LossSums(
        torch.stack([part.loss.detach() for part in parts]).sum(),
        sum(part.acceptance for part in parts),
        sum(part.agreement for part in parts),
        sum(part.num_rows for part in parts),
    )
