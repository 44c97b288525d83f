"""The training objective of EAGLE heads: the target's distribution after every position of a text, several draft tokens deep
(test-time training, EAGLE-3, arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.heads import EagleHead
from foredraft.heads.unrolled import unroll_states
from foredraft.model import LanguageModel
from foredraft.model.taps import FINAL_NORM
from foredraft.train.blocks import IGNORED, ROW_MULTIPLE
from foredraft.train.losses import DistillationLoss, LossSums, TargetDistribution
from foredraft.train.target_logits import TargetLogits


class TargetStates:
    """Computes a target's hidden states for whole blocks, as when it serves."""

    def __init__(self, target: LanguageModel, taps: Sequence[int]) -> None:
        self._target, self._taps = target, tuple(taps)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids: [B, L] -> features [B, L, F] and what the lm_head reads [B, L, H], float32"""
        states = torch.stack(self._target.read_features(ids.tolist(), (*self._taps, FINAL_NORM))).float()
        width = states.shape[-1] // (len(self._taps) + 1)
        return states[..., :-width], states[..., -width:]


@dataclass(frozen=True, slots=True)
class UnrolledDrafts:
    """states: of the target, for the head's taps. target_logits: for the ids that the head can draft. num_steps: how many draft tokens
    deep. decay: the weight of a step relative to the one before."""

    states: TargetStates
    target_logits: TargetLogits
    num_steps: int
    decay: float
    loss: DistillationLoss

    def __call__(self, student: EagleHead, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """ids, next_ids: [B, L] -> see stepwise_loss"""
        with torch.no_grad():
            features, final = self.states(ids)
            targets = StepTargets.of(final, self.target_logits, next_ids, self.loss)
        tokens = torch.cat([ids[:, 1:], next_ids[:, -1:].clamp(min=0)], dim=1)
        steps = unroll_states(student, features, tokens, self.num_steps)
        return stepwise_loss(steps, lambda _, states: student.logits(states), targets, self.decay, self.loss, progress)

    def shapes(self, student: EagleHead, ids: Tensor) -> Iterator[Tensor]:
        """See Objective."""
        config = student.config
        # the target's own embeddings may be packed, and only the kernels can read those
        head = student.with_embeddings(lambda rows: torch.empty(len(rows), config.hidden_size))
        features = torch.empty(*ids.shape, config.feature_size)
        for step, states in enumerate(unroll_states(head, features, ids, self.num_steps)):
            yield head.logits(compared_rows(states, step))


def unrolled_objectives(
    head: EagleHead, target: LanguageModel, num_steps: int, decay: float
) -> Callable[[DistillationLoss], UnrolledDrafts]:
    """What a step of this head minimises, for each loss. num_steps, decay: see UnrolledDrafts."""
    states = TargetStates(target, head.config.taps)
    logits = TargetLogits.of(target, head.config.target_ids)
    return lambda loss: UnrolledDrafts(states, logits, num_steps, decay, loss)


@dataclass(frozen=True, slots=True)
class StepTargets:
    """The target's distributions that drafts are compared with: row P of step j is compared with the one after the token at
    P + 1 + j, if that token is predicted.

    mask: [B, L], where the next token is predicted. after_each: [R, D], after each predicted token. places: [B, L], the row of
    after_each for each position that has one.
    """

    mask: Tensor
    after_each: TargetDistribution
    places: Tensor

    @classmethod
    def of(cls, final: Tensor, target_logits: TargetLogits, next_ids: Tensor, loss: DistillationLoss) -> StepTargets:
        """final: [B, L, H], what the lm_head reads. next_ids: [B, L]"""
        mask = next_ids != IGNORED
        is_predicted = functional.pad(mask[:, :-1], (1, 0))
        places = (is_predicted.flatten().cumsum(0) - 1).view_as(mask)
        return cls(mask, loss.distribution(target_logits(rows_of(final, is_predicted))), places)

    def rows(self, step: int) -> Tensor:
        """[B, L - 1 - step], which rows of the step are compared"""
        return self.mask[:, step:-1]

    def at(self, step: int) -> TargetDistribution:
        """[R, D], for those rows"""
        return self.after_each.select(self.places[:, step + 1 :][self.rows(step)])


def rows_of(states: Tensor, mask: Tensor) -> Tensor:
    """The rows in the mask, then copies of the first row until their number is a multiple of ROW_MULTIPLE. states: [B, L, H].
    mask: [B, L] -> [R, H]"""
    rows = mask.flatten().nonzero()[:, 0]
    return states.flatten(0, 1)[functional.pad(rows, (0, -len(rows) % ROW_MULTIPLE))]


def compared_rows(states: Tensor, step: int) -> Tensor:
    """The rows of a step that stepwise_loss reads, if all tokens are predicted. states: [B, L, H] -> [R, H]"""
    rows = states[:, : max(0, states.shape[1] - 1 - step)].flatten(0, 1)
    return rows[torch.arange(len(rows) + -len(rows) % ROW_MULTIPLE) % len(rows)]


def stepwise_loss(
    steps: Iterable[Tensor],
    logits_of: Callable[[int, Tensor], Tensor],
    targets: StepTargets,
    decay: float,
    loss: DistillationLoss,
    progress: float,
) -> LossSums:
    """steps: for each draft token what the lm_head reads, [B, L, H], whose last rows have no meaning. logits_of: from the number
    of a step and some of its rows, [R, H], to logits [R, D]. decay: the weight of a step relative to the one before. -> the
    weighted mean of the steps' sums; acceptance and agreement are those of the first step"""
    sums: list[LossSums] = []
    for step, states in enumerate(steps):
        rows = targets.rows(step)
        logits = logits_of(step, rows_of(states[:, : rows.shape[1]], rows))
        sums.append(loss(logits, targets.at(step), progress))
    weights = torch.tensor([decay**step for step in range(len(sums))])
    weighted = (torch.stack([each.loss for each in sums]) * weights).sum() / weights.sum()
    return replace(sums[0], loss=weighted)
