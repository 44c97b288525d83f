"""Medusa heads that adapt to the texts: a linear correction of what their lm_heads read, learned while texts are written.

Head h should output the hidden state from which the target draws the token that head h drafts. The target computes that state a few
steps later anyway, so every position of a text is an example that costs no extra pass. The correction reads what the heads read and,
as Hydra heads do (arXiv:2402.05109), the pending token, both reduced by a random projection to NUM_INPUTS numbers.

A smaller error of the states does not always mean a higher acceptance rate: where the heads predict a text well, the correction may do
harm. So it is used only while its drafts are accepted more often than those of the unchanged heads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from foredraft.drafters._drafts import Draft
from foredraft.drafters._least_squares import RecursiveLeastSquares
from foredraft.drafters._variants import DraftVariants
from foredraft.drafters.refit_schedule import RefitSchedule
from foredraft.engine.proposal import DraftRequest
from foredraft.heads import MedusaHead

MAX_EXAMPLES = 64
"""About as many positions as 64 steps add to one text. Most of the time of a refit does not depend on their number."""
NUM_INPUTS = 128
_SEED = 0
_UNCHANGED = 0


class _Examples(NamedTuple):
    """hidden: [n, H]. pending: [n, E], the embeddings of the tokens after. wanted: [n, heads, H]."""

    hidden: Tensor
    pending: Tensor
    wanted: Tensor


class StateRefit:
    """Shared by all texts of a drafter, so that what is learned from one text serves the next. Requests without prefix_caching are not
    learned from.

    schedule: when to learn, from at most MAX_EXAMPLES positions each time, the newest of each text.
    """

    def __init__(self, head: MedusaHead, schedule: RefitSchedule) -> None:
        self.schedule = schedule
        self._head = head
        width, num_heads = head.config.target_hidden_size, head.config.num_heads
        width_in = width + self._embedded([0]).shape[1]
        projection = torch.randn(NUM_INPUTS, width_in, generator=torch.Generator().manual_seed(_SEED))
        self._projection = (projection * NUM_INPUTS**-0.5).to(head.device)
        self._correction = RecursiveLeastSquares(NUM_INPUTS, num_heads * width, head.device)
        self._num_learned: dict[int, int] = {}
        self._variants = DraftVariants()
        self._variant = _UNCHANGED

    def states(self, requests: Sequence[DraftRequest], hidden: Tensor) -> Tensor:
        """The inputs of the lm_heads, after learning if that is due. hidden: [len(requests), H], of the last token that the target has
        read -> [len(requests), heads, H]"""
        if self.schedule.is_due:
            self._learn(requests)
        self._variant, hidden = self._variants.choose(requests), hidden.to(self._head.dtype)
        if self._variant == _UNCHANGED:
            return self._head.states(hidden)
        pending = self._embedded([request.tokens[_num_read(request)] for request in requests])
        return self._corrected(hidden, self._inputs(hidden, pending))

    def remember(self, drafts: Sequence[Draft]) -> None:
        """Note what was drafted from the last states, to count what is accepted."""
        for draft in drafts:
            self._variants.remember(draft.request, draft.ids, draft.parents, self._variant)

    def _learn(self, requests: Sequence[DraftRequest]) -> None:
        """Learn from what the target has read since the last refit."""
        started = time.perf_counter()
        parts, room = list[_Examples](), MAX_EXAMPLES
        for request in requests:
            if room and request.sampler.params.prefix_caching:
                parts += self._examples(request, room)
                room = MAX_EXAMPLES - sum(len(part.hidden) for part in parts)
        if not parts:
            return
        hidden, pending, wanted = (torch.cat(each) for each in zip(*parts, strict=True))
        inputs = self._inputs(hidden, pending)
        # in float32: in half precision, products of many rows are slow on processors without instructions for them
        errors = wanted - self._corrected(hidden.float(), inputs)
        self._correction.learn(inputs, errors.flatten(1))
        self.schedule.record(len(hidden), time.perf_counter() - started)

    def forget(self, seq_ids: Sequence[int]) -> None:
        self._variants.forget(seq_ids)
        for seq_id in seq_ids:
            self._num_learned.pop(seq_id, None)

    def _examples(self, request: DraftRequest, at_most: int) -> list[_Examples]:
        """The newest examples that were not learned from yet: one block, or none."""
        assert request.features is not None
        num_heads = self._head.config.num_heads
        end = _num_read(request) - num_heads  # after the last position whose wanted states are all known
        start = max(self._num_learned.get(request.seq_id, 0), end - at_most)
        if start >= end:
            return []
        self._num_learned[request.seq_id] = end
        rows = request.features.since(start)
        wanted = [rows[head + 1 :][: end - start] for head in range(num_heads)]
        pending = self._embedded([*islice(request.tokens, start + 1, end + 1)])
        return [_Examples(rows[: end - start], pending, torch.stack(wanted, dim=1).float())]

    def _embedded(self, tokens: Sequence[int]) -> Tensor:
        return self._head.embed(torch.tensor(tokens, device=self._head.device))

    def _inputs(self, hidden: Tensor, pending: Tensor) -> Tensor:
        """[n, NUM_INPUTS]"""
        return linear(torch.cat((normalize(hidden.float()), normalize(pending.float())), dim=1), self._projection)

    def _corrected(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """[n, heads, H], in the precision of hidden"""
        states = self._head.states(hidden)
        return states + self._correction(inputs).view(states.shape).to(states.dtype)


def _num_read(request: DraftRequest) -> int:
    """How many tokens the target has read; the next one is the pending token."""
    assert request.features is not None
    return len(request.features)
