"""Block verification: Sun et al., arXiv:2403.10444. It verifies tokens jointly, so it accepts at least as many as one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.verify.law import Case, OutcomeLaw, drafted


def block_law(case: Case) -> OutcomeLaw:
    """P_0 = 1, P_i = min(1, P_{i-1} p_i/q_i); h_i = Z_i / (Z_i + 1 - P_i) with Z_i the mass of max(P_i p - q, 0) at the
    next position, and h_n = P_n at the last draft token. Each position i is accepted with probability h_i, independently, and the
    draft is cut at the largest accepted i: stop_i = h_i * prod_{j>i} (1 - h_j), with h_0 = 1. The next token comes from
    norm(max(P_i p - q, 0)).
    """
    present = drafted(case)
    scale = _scales(case, present)
    holds = torch.where(present, _holds(case, scale[:, 1:]), 0)
    ones = torch.ones_like(scale[:, :1])
    later_fail = (1 - holds).flip(1).cumprod(1).flip(1)
    stop = torch.cat([ones, holds], dim=1) * torch.cat([later_fail, ones], dim=1)
    return OutcomeLaw(stop=stop, scale=scale)


def _scales(case: Case, present: Tensor) -> Tensor:
    """[B, K+1]: P_0 .. P_K."""
    ratios = case.p_draft / torch.where(present, case.q_draft, 1)
    scales = [torch.ones_like(case.p[:, 0, 0])]
    for i in range(ratios.shape[1]):
        scales.append((scales[-1] * ratios[:, i]).clamp(max=1))
    return torch.stack(scales, dim=1)


def _holds(case: Case, scale: Tensor) -> Tensor:
    """[B, K]: h_1 .. h_K."""
    num_places = scale.shape[1]
    is_last = torch.arange(1, num_places + 1, device=scale.device)[None] == case.lens[:, None]
    # Z at positions 1..K-1; the last column has no q after it and is only used where it is a last position
    residual = (scale[:, :-1, None] * case.p[:, 1:num_places] - case.q[:, 1:]).clamp(min=0)
    mass = torch.cat([residual.sum(-1), torch.zeros_like(scale[:, :1])], dim=1) if num_places else scale
    whole = mass + 1 - scale
    holds = torch.where(whole > 0, mass / torch.where(whole > 0, whole, 1), 1)
    return torch.where(is_last, scale, holds)
