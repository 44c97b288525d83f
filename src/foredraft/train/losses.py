"""What is minimised, with its gradient in closed form: a row of logits is read once, and nothing as wide as the vocabulary
is kept but the gradient itself.

With p the target's law and q the student's, both softmax(logits / T) over the same vocabulary, rejection sampling accepts a
draft token with probability Σ min(p, q) = 1 - TV(p, q) (arXiv:2211.17192), so total variation is the rejections themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 20
"""Logits that are worked on together: what fits the processor's caches."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Sums over rows. loss: what is minimised; carries the gradient. acceptance: of Σ min(p, q); without a target, of q at
    the token of the text. agreement: rows in which both have the same likeliest token. num_rows: how many."""

    loss: Tensor
    acceptance: float
    agreement: float
    num_rows: int


def next_token(logits: Tensor, following: Tensor) -> Measure:
    """Cross-entropy in nats. logits: [R, V]; following: [R] ids."""
    loss, acceptance, agreement = _Loss.apply(logits, following, None, 1.0, None)  # type: ignore[no-untyped-call]
    return Measure(loss, float(acceptance), float(agreement), len(following))


def distilled(logits: Tensor, target_logits: Tensor, temperature: float, kl_share: float) -> Measure:
    """kl_share · KL(p, q) + (1 - kl_share) · TV(p, q), in nats and in probability.

    logits, target_logits: [R, V]. temperature: above 0, of both laws.
    """
    loss, acceptance, agreement = _Loss.apply(logits, None, target_logits, temperature, kl_share)  # type: ignore[no-untyped-call]
    return Measure(loss, float(acceptance), float(agreement), len(logits))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        following: Tensor | None,
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
                assert following is not None
                sums += _next_token_rows(logits[rows], following[rows], gradient[rows])
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


def _next_token_rows(logits: Tensor, following: Tensor, gradient: Tensor) -> Tensor:
    logits = _wide(logits)
    q = torch.softmax(logits, dim=-1)
    at = following[:, None].long()
    own = q.gather(1, at)[:, 0]
    likeliest = (logits.argmax(-1) == following).sum()
    loss = (logits.logsumexp(-1) - logits.gather(1, at)[:, 0]).sum()
    gradient.copy_(q.scatter_add_(1, at, q.new_full(at.shape, -1.0)))
    return torch.stack([loss.double(), own.double().sum(), likeliest.double()])


def _distilled_rows(
    logits: Tensor, target_logits: Tensor, temperature: float, kl_share: float, gradient: Tensor
) -> Tensor:
    logits, target_logits = _wide(logits), _wide(target_logits)
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
        ours, theirs = torch.log_softmax(logits / temperature, -1), torch.log_softmax(target_logits / temperature, -1)
        loss = loss + kl_share * (p * (theirs - ours)).double().sum()
        slope.add_(q - p, alpha=kl_share / temperature)
    gradient.copy_(slope)
    return torch.stack([loss, overlap.double().sum(), agreement.double()])


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
