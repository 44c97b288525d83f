"""The training objective of block drafters: the target's distribution at every position of a draft, for drafts that begin at random
positions of a text (DFlash, z-lab; DSpark, arXiv:2607.05147). The tokens before a draft position are the text's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.heads import DFlashHead
from foredraft.heads.unrolled_blocks import unroll_blocks
from foredraft.train.blocks import IGNORED, draft_generator
from foredraft.train.losses import DistillationLoss, LossSums
from foredraft.train.target_logits import TargetLogits
from foredraft.train.unrolled_drafts import TargetStates


@dataclass(frozen=True, slots=True)
class BlockDrafts:
    """states: of the target, for the head's taps. target_logits: for the ids that the head can draft. anchor_every: tokens of a text per
    draft. decay: the weight of a draft position relative to the one before."""

    states: TargetStates
    target_logits: TargetLogits
    anchor_every: int
    decay: float
    loss: DistillationLoss

    def __call__(self, student: DFlashHead, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """ids, next_ids: [B, L]. -> sums over the positions that have a next token: a position's loss is the weighted mean over the
        positions in all drafts, and its acceptance and agreement are those of the first position in a draft"""
        is_predicted = next_ids != IGNORED
        with torch.no_grad():
            features, final = self.states(ids)
            distributions = self.loss.distribution(self.target_logits(final[is_predicted]))
        numbers = (is_predicted.flatten().cumsum(0) - 1).view_as(is_predicted)
        generator = draft_generator(ids, progress if student.training else 0.0)
        anchors = drawn_anchors(is_predicted, self.anchor_every, generator)
        parts: list[LossSums] = []
        for place, logits in enumerate(unroll_blocks(student, features, ids, anchors)):
            positions = anchors + place
            inside = positions.clamp(max=ids.shape[1] - 1)
            is_compared = ((positions < ids.shape[1]) & is_predicted.gather(1, inside)).flatten()
            wanted = numbers.gather(1, inside).flatten()[is_compared]
            order = is_compared.int().argsort(descending=True, stable=True)  # rows after the compared ones are ignored
            parts.append(self.loss(logits[order], distributions.select(wanted), progress))
        return _joined(parts, self.decay, int(is_predicted.sum()))

    def shapes(self, student: DFlashHead, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        config = student.config
        # the target's own embeddings may be packed, and only the kernels can read those
        head = student.with_embeddings(lambda rows: torch.empty(len(rows), config.hidden_size))
        anchors = torch.ones(len(ids), num_anchors(ids.shape[1], self.anchor_every), dtype=torch.int64)
        yield from unroll_blocks(head, torch.empty(*ids.shape, config.feature_size), ids, anchors)


def num_anchors(length: int, anchor_every: int) -> int:
    """The number of anchors in a text of this length."""
    return max(1, (length - 1) // anchor_every)


def drawn_anchors(is_predicted: Tensor, anchor_every: int, generator: torch.Generator) -> Tensor:
    """Sorted random positions from 1 on, first of all those with a predicted token. is_predicted: [B, L]. -> [B, A]"""
    batch, length = is_predicted.shape
    order = torch.rand(batch, max(1, length - 1), generator=generator)
    order += ~is_predicted.cpu()[:, -order.shape[1] :]
    drawn = order.argsort(1)[:, : num_anchors(length, anchor_every)]
    return (1 + drawn.sort(1).values).clamp(max=length - 1).to(is_predicted.device)


def _joined(parts: list[LossSums], decay: float, num_positions: int) -> LossSums:
    """parts: of each draft position. Without rows in the first, no position after a text's first is predicted: there is no loss."""
    if not parts[0].num_rows:
        return parts[0]
    compared = [(decay**place, part.loss / part.num_rows) for place, part in enumerate(parts) if part.num_rows]
    loss = torch.stack([weight * mean for weight, mean in compared]).sum() / sum(weight for weight, _ in compared)
    first = num_positions / parts[0].num_rows
    return LossSums(loss * num_positions, parts[0].acceptance * first, parts[0].agreement * first, num_positions)
