"""What an EAGLE head is trained on: the target's distribution behind every position of a text, several drafted tokens deep
(test-time training, EAGLE-3, arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.heads import EagleHead
from foredraft.heads.unrolled import unroll
from foredraft.model import LanguageModel
from foredraft.model.taps import FINAL_NORM
from foredraft.train.blocks import IGNORED
from foredraft.train.losses import LossSums, distillation_loss
from foredraft.train.objectives import kl_share


class TargetStates:
    """Hidden states of a target for whole blocks, as it computes them when it serves."""

    def __init__(self, target: LanguageModel, taps: Sequence[int]) -> None:
        self._target, self._taps = target, tuple(taps)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids: [B, L] -> features [B, L, F] and what the lm_head reads [B, L, H], float32"""
        states = torch.stack(self._target.read_features(ids.tolist(), (*self._taps, FINAL_NORM))).float()
        width = states.shape[-1] // (len(self._taps) + 1)
        return states[..., :-width], states[..., -width:]


@dataclass(frozen=True, slots=True)
class UnrolledDrafts:
    """states: of the target, for the head's taps. lm_head_rows: [D, H], the target's, of the ids that the head can draft.
    num_steps: how many drafted tokens deep. decay: the weight of a step over that of the one before. loss, temperature, kl_until: as
    in Distillation."""

    states: TargetStates
    lm_head_rows: Tensor
    num_steps: int = 5
    decay: float = 0.8
    loss: str = "kl+tv"
    temperature: float = 1.0
    kl_until: float = 0.5

    def __call__(self, student: EagleHead, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        """ids, next_ids: [B, L] -> the weighted mean of the steps' sums; acceptance and agreement are those of the first step"""
        with torch.no_grad():
            features, final = self.states(ids)
            target_logits = final @ self.lm_head_rows.T
        steps = unroll(student, features, next_ids.clamp(min=0), self.num_steps)
        share = kl_share(self.loss, self.kl_until, progress)
        return stepwise_loss(steps, target_logits, next_ids, self.decay, self.temperature, share)


def stepwise_loss(
    steps: Iterable[Tensor], target_logits: Tensor, next_ids: Tensor, decay: float, temperature: float, share: float
) -> LossSums:
    """steps: for each drafted token logits [B, L, D], of which the last mean nothing. Row P of step j is compared with the target
    after the token at P + 1 + j. target_logits: [B, L, D]. next_ids: [B, L]. decay: the weight of a step over that of the one
    before. share: of KL. -> the weighted mean of the steps' sums; acceptance and agreement are those of the first step"""
    sums: list[LossSums] = []
    for step, logits in enumerate(steps):
        end = next_ids.shape[1] - 1 - step
        mask = next_ids[:, step : step + end] != IGNORED  # the last token before the drafted one is one of the text
        theirs = target_logits[:, step + 1 :][mask]
        sums.append(distillation_loss(logits[:, :end][mask], theirs, temperature, share))
    weights = torch.tensor([decay**step for step in range(len(sums))])
    loss = (torch.stack([each.loss for each in sums]) * weights).sum() / weights.sum()
    return replace(sums[0], loss=loss)
