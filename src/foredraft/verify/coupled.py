"""Follow the target's own token while the draft contains it.

Exact whenever the target's tokens do not depend on the draft: at temperature 0, with shared noise (the target's token at
output position t is argmax(log p_t + Gumbel(seed, child, t, id)), whatever was drafted), and with certain drafts (the
target's token is drawn from p independently of them).
"""

from __future__ import annotations

from torch import Tensor

from foredraft.engine.proposal import tensor_of


def walk(own_ids: Tensor, draft_ids: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """own_ids: [B, K+1], the target's own token after each prefix of the draft; draft_ids: [B, K]; lens: [B].

    -> (how many draft tokens stand [B], the next token [B])
    """
    num_accepted, next_ids = [], []
    for own, drafted, length in zip(own_ids.tolist(), draft_ids.tolist(), lens.tolist(), strict=True):
        stood = 0
        while stood < length and own[stood] == drafted[stood]:
            stood += 1
        num_accepted.append(stood)
        next_ids.append(own[stood])
    return tensor_of(num_accepted), tensor_of(next_ids)
