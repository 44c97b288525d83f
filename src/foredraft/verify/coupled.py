"""Verification that follows the target's own tokens as long as the draft, a chain or a tree, contains them.

It is exact whenever the target's tokens do not depend on the draft: at temperature 0, with shared noise (the target's token at
output position t is argmax(log p_t + Gumbel(seed, child, t, id)), whatever was drafted), and with certain drafts (the target's
token is drawn from p independently of them).
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.engine.token_tree import ROOT


def walk(
    own_ids: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int] | None = None
) -> tuple[Sequence[int], int]:
    """own_ids: the target's own token after the pending token and after each draft token: one more than draft_ids. parents: as in
    Proposal, None for a chain.

    -> (the indices of the accepted draft tokens, the next token)
    """
    if parents is not None:
        return _walk_tree(own_ids, draft_ids, parents)
    num_accepted = 0
    while num_accepted < len(draft_ids) and own_ids[num_accepted] == draft_ids[num_accepted]:
        num_accepted += 1
    return range(num_accepted), own_ids[num_accepted]


def _walk_tree(own_ids: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """Walk a tree. A parent comes before its children, so one pass over the nodes is enough."""
    path: list[int] = []
    node, own = ROOT, own_ids[0]
    for child, (token, parent) in enumerate(zip(draft_ids, parents, strict=True)):
        if parent == node and token == own:
            node, own = child, own_ids[child + 1]
            path.append(node)
    return path, own
