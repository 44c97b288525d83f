"""Follow the target's own token while the draft contains it.

Exact whenever the target's tokens do not depend on the draft: at temperature 0, with shared noise (the target's token at
output position t is argmax(log p_t + Gumbel(seed, child, t, id)), whatever was drafted), and with certain drafts (the
target's token is drawn from p independently of them).
"""

from __future__ import annotations

from collections.abc import Sequence


def walk(own_ids: Sequence[int], draft_ids: Sequence[int]) -> tuple[range, int]:
    """own_ids: the target's own token after each prefix of the draft, one more than there are draft_ids.

    -> (the positions of the draft tokens that stand, the next token)
    """
    num_accepted = 0
    while num_accepted < len(draft_ids) and own_ids[num_accepted] == draft_ids[num_accepted]:
        num_accepted += 1
    return range(num_accepted), own_ids[num_accepted]
