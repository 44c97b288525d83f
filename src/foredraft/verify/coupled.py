"""Follow the target's own token while the draft contains it.

Exact whenever the target's tokens do not depend on the draft: at temperature 0, with shared noise (the target's token at
output position t is argmax(log p_t + Gumbel(seed, child, t, id)), whatever was drafted), and with certain drafts (the
target's token is drawn from p independently of them).
"""

from __future__ import annotations

from torch import Tensor


def walk(own_ids: Tensor, draft_ids: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """own_ids: [B, K+1], the target's own token after each prefix of the draft; draft_ids: [B, K]; lens: [B].

    -> (how many draft tokens stand [B], the next token [B])
    """
    num_places = draft_ids.shape[1]
    within = own_ids.new_ones(lens.shape[0], num_places).cumsum(1) <= lens[:, None]
    stands = ((own_ids[:, :num_places] == draft_ids) & within).cumprod(1)
    num_accepted = stands.sum(1)
    return num_accepted, own_ids.gather(1, num_accepted[:, None])[:, 0]
