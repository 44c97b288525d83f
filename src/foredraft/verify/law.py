"""Verification in two parts: the distribution of its outcome, and a draw from it.

A rule (rejection, block) computes the distribution of the outcome, an OutcomeLaw, from target probabilities and a proposal: the
probability of stopping after each draft token, and the distribution of the next token for each stop. That part is deterministic.
`draw` then draws from it, in the same way for every rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.sampling import inverse_cdf


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of chains to verify. Row b has lens[b] draft tokens; the values beyond them are never used.

    p: [B, K+1, W] target distributions; position i follows the first i draft tokens. W is V, or the number of ids that p keeps.
    q: [B, K, W] the distributions that the draft tokens were drawn from, on the same ids (a point mass for a certain token).
    p_draft, q_draft: [B, K] the probability of each draft token under its p and its q.
    lens: [B] int64.
    """

    p: Tensor
    q: Tensor
    p_draft: Tensor
    q_draft: Tensor
    lens: Tensor


@dataclass(frozen=True, slots=True)
class OutcomeLaw:
    """The distribution of the outcome. stop: [B, K+1], the probability that exactly j draft tokens are accepted; 0 beyond lens.
    scale: [B, K+1], the next token after j < lens comes from norm(max(scale_j * p_j - q_j, 0)); after lens, from p.
    """

    stop: Tensor
    scale: Tensor


Rule = Callable[[Case], OutcomeLaw]
_ROUNDING = 1e-3


def what_is_wrong(law: OutcomeLaw, case: Case) -> str | None:
    """Why an outcome distribution is invalid, in words that follow the rule's name; None if it is valid. Waits for the device."""
    if not isinstance(law, OutcomeLaw):
        return f"must return an OutcomeLaw, not {type(law).__name__}"
    shape = case.p.shape[:2]
    for name, part in (("stop", law.stop), ("scale", law.scale)):
        if not isinstance(part, Tensor) or part.shape != shape:
            actual = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            return f"must return {name} as [B, K + 1] = {tuple(shape)}, not {actual}"
        if not bool(part.isfinite().all()):
            return f"returned a {name} that is not finite"
    beyond = torch.arange(shape[1], device=case.lens.device)[None] > case.lens[:, None]
    if bool((law.stop < -_ROUNDING).any()) or bool((law.stop[beyond] != 0).any()):
        return "returned a stop below 0, or one beyond a draft's length"
    if bool(((law.stop.sum(1) - 1).abs() > _ROUNDING).any()):
        return "returned stops that do not sum to 1"
    return None


def next_weights(case: Case, law: OutcomeLaw, stop: Tensor) -> Tensor:
    """The distribution of the next token, not normalised, given the number of accepted draft tokens. stop: [B] -> [B, W]"""
    rows = torch.arange(stop.shape[0], device=stop.device)
    p = case.p[rows, stop]
    if case.q.shape[1] == 0:
        return p
    q = case.q[rows, stop.clamp(max=case.q.shape[1] - 1)]
    residual = (law.scale[rows, stop][:, None] * p - q).clamp(min=0)
    # an empty residual is only reached with probability 0, up to rounding: use p itself then
    use_p = (stop >= case.lens) | (residual.amax(-1) <= 0)
    return torch.where(use_p[:, None], p, residual)


def draw(case: Case, law: OutcomeLaw, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """uniforms: [B, 2] in [0, 1) -> (the number of accepted draft tokens [B], the column of the next token [B])"""
    stop = inverse_cdf(law.stop, uniforms[:, 0])
    return stop, inverse_cdf(next_weights(case, law, stop), uniforms[:, 1])


def drafted(case: Case) -> Tensor:
    """[B, K] bool: which positions hold a draft token."""
    return torch.arange(case.q_draft.shape[1], device=case.lens.device)[None] < case.lens[:, None]
