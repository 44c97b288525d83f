"""Rejection sampling without replacement for trees whose siblings were drawn: Jeon et al., arXiv:2402.14160. A reference.

The engine walks trees instead (coupled.py): that needs no q, keeps the promise of seeds, and accepts as often
(docs/internals/trees.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.token_tree import TreeShape


def siblings_law(p: Tensor, q: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The children of one node, which were drawn one after another, each from what is left of q.

    p, q: [..., V] the distributions of the target and of the draft behind the node. ids: [..., k] int64, the children in the order in
    which they were drawn. Each child stands with probability min(1, p/q); after one that does not, p is norm(max(p - q, 0)),
    and q is without the child.

    -> the probability of each child to stand, no child before it having stood [..., k]; the distribution of the next token if none
    stands [..., V]
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
    """The law of the outcome of a whole tree, whose siblings come in the order in which they were drawn.

    p, q: [N + 1, V] the distributions behind the pending token, and behind each of the N nodes.

    -> the probability that the accepted path ends behind the pending token, or at each node [N + 1]; the distribution of the next
    token behind each of them [N + 1, V]
    """
    stop, next_probs = torch.zeros_like(p[:, 0]), p.clone()
    reached = torch.zeros_like(stop)
    reached[0] = 1
    for row in range(len(ids) + 1):  # a node comes behind its parent
        children = shape.children.get(row - 1, [])
        drawn = torch.tensor([ids[child] for child in children], dtype=torch.int64)
        stands, next_probs[row] = siblings_law(p[row], q[row], drawn)
        for child, probability in zip(children, stands, strict=True):
            reached[child + 1] = reached[row] * probability
        stop[row] = reached[row] * (1 - stands.sum())
    return stop, next_probs


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """1 where the denominator is 0: what cannot be drawn is never rejected."""
    return torch.where(denominator > 0, numerator / denominator.where(denominator > 0, 1), 1)


def _normalized(weights: Tensor) -> Tensor:
    """Zeros stay zeros."""
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1)
