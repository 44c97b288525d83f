"""Token-level speculative sampling, the reference rule: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318."""

from __future__ import annotations

import torch

from foredraft.verify.law import Case, OutcomeLaw, drafted


def rejection_law(case: Case) -> OutcomeLaw:
    """Draft token i is accepted with probability min(1, p/q) if all before it are; after the first rejected one, the next token comes
    from norm(max(p - q, 0))."""
    present = drafted(case)
    # q > 0 for a drawn token; the guard only keeps padding finite
    ratio = case.p_draft / torch.where(present, case.q_draft, 1)
    stands = torch.where(present, ratio.clamp(max=1), 0)
    ones = torch.ones_like(case.p[:, :1, 0])
    reached = torch.cat([ones, stands.cumprod(1)], dim=1)
    falls = torch.cat([1 - stands, ones], dim=1)
    return OutcomeLaw(stop=reached * falls, scale=torch.ones_like(reached))
