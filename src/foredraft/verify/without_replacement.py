"""Rejection sampling without replacement for trees whose siblings were drawn: Jeon et al., arXiv:2402.14160. A reference only.

The engine walks trees instead (coupled.py), which needs no q, keeps seeded texts independent of drafts, and accepts as often
(docs/internals/trees.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.token_tree import TreeShape


def siblings_law(p: Tensor, q: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Verify the children of one node, which were drawn one after another, each from the rest of q.

    p, q: [..., V] the distributions of the target and of the draft after the node. ids: [..., k] int64, the children in the order in
    which they were drawn. Each child is accepted with probability min(1, p/q); if it is rejected, p becomes norm(max(p - q, 0)),
    and the child is removed from q.

    -> the probability that each child is the accepted one [..., k]; the distribution of the next token if none is accepted [..., V]
    """
    nothing_stands = torch.ones_like(p[..., :1])
    stands = []
    for i in range(ids.shape[-1]):
        child = ids[..., i : i + 1]
        ratio = _over(p.gather(-1, child), q.gather(-1, child)).clamp(max=1)
        stands.append(nothing_stands * ratio)
        nothing_stands = nothing_stands * (1 - ratio)
        p, q = _normalized((p - q).clamp(min=0)), _normalized(q.scatter(-1, child, 0))
    return torch.cat([*stands, nothing_stands[..., :0]], dim=-1), p


def tree_law(ids: Sequence[int], shape: TreeShape, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The outcome distribution of a whole tree, whose siblings are in the order in which they were drawn.

    p, q: [N + 1, V] the distributions after the pending token, and after each of the N nodes.

    -> the probability that the accepted path ends at the pending token, or at each node [N + 1]; the distribution of the next
    token after each of them [N + 1, V]
    """
    stop, next_probs = torch.zeros_like(p[:, 0]), p.clone()
    reached = torch.zeros_like(stop)
    reached[0] = 1
    for row in range(len(ids) + 1):  # a node comes after its parent
        children = shape.children.get(row - 1, [])
        drawn = torch.tensor([ids[child] for child in children], dtype=torch.int64)
        stands, next_probs[row] = siblings_law(p[row], q[row], drawn)
        for child, probability in zip(children, stands, strict=True):
            reached[child + 1] = reached[row] * probability
        stop[row] = reached[row] * (1 - stands.sum())
    return stop, next_probs


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The ratio, or 1 where the denominator is 0: a child that could not be drawn is never rejected."""
    return torch.where(denominator > 0, numerator / denominator.where(denominator > 0, 1), 1)


def _normalized(weights: Tensor) -> Tensor:
    """The weights divided by their sum; all-zero weights stay 0."""
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1)
