"""Losses with gradients in closed form. A row of logits is read once, and nothing as wide as the vocabulary is kept but the
gradient itself.

With p the target's distribution and q the student's, both softmax(logits / T) over the same vocabulary, rejection sampling accepts
a draft token with probability Σ min(p, q) = 1 - TV(p, q) (arXiv:2211.17192). So total variation is the rejection rate itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 20
"""Logits that are processed together, so that they fit the processor's caches."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over rows. loss: carries the gradient. acceptance: of Σ min(p, q); without a target, of q at the next token of the
    text. agreement: rows in which both models, or the model and the text, have the same most likely token."""

    loss: Tensor
    acceptance: float
    agreement: float
    num_rows: int


def next_token_loss(logits: Tensor, next_ids: Tensor) -> LossSums:
    """Cross-entropy in nats. logits: [R, V]; next_ids: [R]."""
    loss, acceptance, agreement = _Loss.apply(logits, next_ids, None, 1.0, None)  # type: ignore[no-untyped-call]
    return LossSums(loss, float(acceptance), float(agreement), len(next_ids))


def distillation_loss(logits: Tensor, target_logits: Tensor, temperature: float, kl_share: float) -> LossSums:
    """kl_share · KL(p, q) + (1 - kl_share) · TV(p, q), in nats and in probability.

    logits, target_logits: [R, V]. temperature: above 0, of both distributions.
    """
    loss, acceptance, agreement = _Loss.apply(logits, None, target_logits, temperature, kl_share)  # type: ignore[no-untyped-call]
    return LossSums(loss, float(acceptance), float(agreement), len(logits))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        next_ids: Tensor | None,
        target_logits: Tensor | None,
        temperature: float,
        kl_share: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(logits)
        size = max(1, _CHUNK // logits.shape[1])
        sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            if target_logits is None:
                assert next_ids is not None
                sums += _next_token_rows(logits[rows], next_ids[rows], gradient[rows])
            else:
                assert kl_share is not None
                sums += _distilled_rows(logits[rows], target_logits[rows], temperature, kl_share, gradient[rows])
        ctx.save_for_backward(gradient)
        loss, acceptance, agreement = sums
        ctx.mark_non_differentiable(acceptance, agreement)
        return loss.to(torch.float32), acceptance, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grads[0].to(gradient.dtype)), None, None, None, None


def _next_token_rows(logits: Tensor, next_ids: Tensor, gradient: Tensor) -> Tensor:
    logits = _at_least_float32(logits)
    q = torch.softmax(logits, dim=-1)
    index = next_ids[:, None].long()
    acceptance = q.gather(1, index)[:, 0]
    agreement = (logits.argmax(-1) == next_ids).sum()
    loss = (logits.logsumexp(-1) - logits.gather(1, index)[:, 0]).sum()
    gradient.copy_(q.scatter_add_(1, index, q.new_full(index.shape, -1.0)))
    return torch.stack([loss.double(), acceptance.double().sum(), agreement.double()])


def _distilled_rows(
    logits: Tensor, target_logits: Tensor, temperature: float, kl_share: float, gradient: Tensor
) -> Tensor:
    logits, target_logits = _at_least_float32(logits), _at_least_float32(target_logits)
    agreement = (logits.argmax(-1) == target_logits.argmax(-1)).sum()
    p = torch.softmax(target_logits / temperature, dim=-1)
    q = torch.softmax(logits / temperature, dim=-1)
    overlap = torch.minimum(p, q).sum(-1)
    loss = (1 - kl_share) * (1 - overlap).double().sum()
    # d TV / d q is -1 where q < p; through the softmax, q · (that - its mean under q)
    lacking = (q < p).to(q.dtype)
    slope = lacking.mul_(-q)
    slope = torch.addcmul(slope, q, slope.sum(-1, keepdim=True), value=-1.0).mul_((1 - kl_share) / temperature)
    if kl_share:
        log_q, log_p = torch.log_softmax(logits / temperature, -1), torch.log_softmax(target_logits / temperature, -1)
        loss = loss + kl_share * (p * (log_p - log_q)).double().sum()
        slope.add_(q - p, alpha=kl_share / temperature)
    gradient.copy_(slope)
    return torch.stack([loss, overlap.double().sum(), agreement.double()])


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
