"""Losses with gradients in closed form. A row of logits is read once, and the only vocabulary-wide tensors kept are the
target's distribution and the gradient itself.

With p the target's distribution and q the student's, both softmax(logits / T) over the same vocabulary, rejection sampling accepts
a draft token with probability Σ min(p, q) = 1 - TV(p, q) (arXiv:2211.17192). So total variation is the rejection rate itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels import Kernels

LOSSES = ("tv", "kl", "kl+tv")
_CHUNK = 1 << 18
"""Logits processed together, so that they fit the processor's caches."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over rows. loss: carries the gradient. acceptance: of Σ min(p, q); without a target, of q at the next token of the
    text. agreement: of rows in which the student's most likely token is also the target's or, without one, the text's."""

    loss: Tensor
    acceptance: float
    agreement: float
    num_rows: int


@dataclass(frozen=True, slots=True)
class TargetDistribution:
    """A target's distributions at a temperature: computed once, however many drafts are compared with them.

    probabilities: [N, V]. negative_entropy: [N], in nats. likeliest: [N], the most probable ids. places: [R], which of the N rows
    each of a draft's rows is compared with; None: all, in order.
    """

    temperature: float
    probabilities: Tensor
    negative_entropy: Tensor
    likeliest: Tensor
    places: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, temperature: float, kernels: Kernels | None = None) -> TargetDistribution:
        """logits: [N, V]. temperature: above 0. kernels: see DistillationLoss."""
        if kernels is not None and _can_compile(logits):
            return cls(temperature, *kernels.softmax(logits, temperature))
        probabilities = torch.empty(logits.shape, dtype=_at_least_float32(logits[:0]).dtype, device=logits.device)
        negative_entropy = probabilities.new_empty(len(logits))
        for rows in _chunks(logits):
            log_p = torch.log_softmax(_at_least_float32(logits[rows]) / temperature, dim=-1)
            p = torch.exp(log_p, out=probabilities[rows])
            # tokens without probability add nothing: 0 · log 0 = 0
            negative_entropy[rows] = torch.linalg.vecdot(p, log_p.clamp_(min=torch.finfo(p.dtype).min))
        return cls(temperature, probabilities, negative_entropy, logits.argmax(-1))

    @property
    def num_rows(self) -> int:
        """R: the number of rows that a draft's rows are compared with."""
        return len(self.probabilities if self.places is None else self.places)

    def select(self, places: Tensor) -> TargetDistribution:
        """places: [R], indices of rows of this one. Nothing is copied: a loss reads the rows chunk by chunk."""
        return replace(self, places=places if self.places is None else self.places[places])

    def chunk(self, rows: slice) -> TargetDistribution:
        """The distributions that these rows of a draft are compared with, in order."""
        index = rows if self.places is None else self.places[rows]
        return TargetDistribution(
            self.temperature, self.probabilities[index], self.negative_entropy[index], self.likeliest[index]
        )


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """How far a student is from the target's distribution at a temperature above 0. name: "tv", "kl", or "kl+tv", which moves
    from KL to total variation, because the gradient of total variation is weak far from the target. kl_until: the share of the
    run in which KL's weight falls to 0. kernels: the compiled ones, used for float32 and bfloat16 on a CPU; elsewhere, and if
    None, PyTorch computes the loss."""

    name: str = "kl+tv"
    temperature: float = 1.0
    kl_until: float = 0.5
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        check_loss(self.name)

    def kl_share(self, progress: float) -> float:
        """The weight of KL; the rest is total variation. progress: the share of the run that is over."""
        if self.name != "kl+tv":
            return float(self.name == "kl")
        return max(0.0, 1 - progress / self.kl_until) if self.kl_until else 0.0

    def distribution(self, target_logits: Tensor) -> TargetDistribution:
        """The distributions that the student is compared with. target_logits: [R, V]"""
        return TargetDistribution.of(target_logits, self.temperature, self.kernels)

    def __call__(self, logits: Tensor, target: TargetDistribution, progress: float) -> LossSums:
        """logits: [R, V], of the student; rows after those of the target are ignored"""
        return distillation_loss(logits, target, self.kl_share(progress), self.kernels)


def check_loss(name: str) -> None:
    """Raises ForedraftError for an unknown loss."""
    if name not in LOSSES:
        raise ForedraftError(f"--loss must be one of {', '.join(LOSSES)}, not {name!r}")


def next_token_loss(logits: Tensor, next_ids: Tensor) -> LossSums:
    """Cross-entropy in nats. logits: [R, V]; next_ids: [R]."""
    return _sums(
        logits,
        len(logits),
        lambda gradient: _by_chunks(gradient, lambda rows, part: _next_token_rows(logits[rows], next_ids[rows], part)),
    )


def distillation_loss(
    logits: Tensor, target: TargetDistribution, kl_share: float, kernels: Kernels | None = None
) -> LossSums:
    """kl_share · KL(p, q) + (1 - kl_share) · TV(p, q), in nats and in probability. logits: [R, V], of the student; rows after
    those of the target are ignored. kernels: see DistillationLoss."""

    def by_torch(gradient: Tensor) -> Tensor:
        return _by_chunks(
            gradient, lambda rows, part: _distilled_rows(logits[rows], target.chunk(rows), kl_share, part)
        )

    def compiled(gradient: Tensor) -> Tensor:
        assert kernels is not None
        of_target = (target.probabilities, target.negative_entropy, target.likeliest)
        rows = logits.detach()[: len(gradient)]
        return kernels.distill(rows, target.temperature, of_target, target.places, kl_share, gradient).sum(0)

    return _sums(logits, target.num_rows, by_torch if kernels is None or not _can_compile(logits) else compiled)


def _can_compile(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)


_WriteGradient: TypeAlias = Callable[[Tensor], Tensor]
"""(the tensor [N, V] to write the gradient of the rows that count into) -> float64 sums over them: loss, acceptance and agreement"""


def _by_chunks(gradient: Tensor, rows_loss: Callable[[slice, Tensor], Tensor]) -> Tensor:
    """rows_loss: given some rows and their part of the gradient. See _WriteGradient."""
    sums = torch.zeros(3, dtype=torch.float64, device=gradient.device)
    for rows in _chunks(gradient):
        sums += rows_loss(rows, gradient[rows])
    return sums


def _sums(logits: Tensor, num_rows: int, write_gradient: _WriteGradient) -> LossSums:
    """The sums over the first num_rows rows."""
    loss, acceptance, agreement = _Loss.apply(logits, num_rows, write_gradient)  # type: ignore[no-untyped-call]
    return LossSums(loss, float(acceptance), float(agreement), num_rows)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_rows: int, write_gradient: _WriteGradient) -> tuple[Tensor, ...]:
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient[num_rows:] = 0
        loss, acceptance, agreement = write_gradient(gradient[:num_rows])
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(acceptance, agreement)
        return loss.to(torch.float32), acceptance, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grads[0].to(gradient.dtype)), None, None


def _next_token_rows(logits: Tensor, next_ids: Tensor, gradient: Tensor) -> Tensor:
    logits = _at_least_float32(logits)
    q = torch.softmax(logits, dim=-1)
    index = next_ids[:, None].long()
    acceptance = q.gather(1, index)[:, 0]
    agreement = (logits.argmax(-1) == next_ids).sum()
    loss = (logits.logsumexp(-1) - logits.gather(1, index)[:, 0]).sum()
    gradient.copy_(q.scatter_add_(1, index, q.new_full(index.shape, -1.0)))
    return torch.stack([loss.double(), acceptance.double().sum(), agreement.double()])


def _distilled_rows(logits: Tensor, target: TargetDistribution, kl_share: float, gradient: Tensor) -> Tensor:
    """logits: [N, V]. target: has as many rows."""
    p = target.probabilities
    log_q = torch.log_softmax(_at_least_float32(logits) / target.temperature, dim=-1)
    agreement = (log_q.argmax(-1) == target.likeliest).sum()
    divergence = target.negative_entropy - torch.linalg.vecdot(p, log_q)
    q = log_q.exp_()  # computed in the same way as p, so that a student equal to its target has no gradient
    overlap = torch.minimum(p, q).sum(-1)
    loss = kl_share * divergence.double().sum() + (1 - kl_share) * (1 - overlap.double()).sum()
    gradient.copy_(_slope(p, q, kl_share).div_(target.temperature))
    return torch.stack([loss, overlap.double().sum(), agreement.double()])


def _slope(p: Tensor, q: Tensor, kl_share: float) -> Tensor:
    """The gradient of the loss by the logits, at temperature 1. p, q: [N, V] -> [N, V]"""
    if kl_share == 1:
        return q - p
    # d TV / d q is -1 where q < p; through the softmax, q · (that - its mean under q)
    slope = (q < p).to(q.dtype).mul_(-q)
    slope = torch.addcmul(slope, q, slope.sum(-1, keepdim=True), value=-1.0).mul_(1 - kl_share)
    return slope.add_(q - p, alpha=kl_share) if kl_share else slope


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows that are processed together."""
    size = max(1, _CHUNK // logits.shape[1])
    return (slice(start, min(start + size, len(logits))) for start in range(0, len(logits), size))


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
