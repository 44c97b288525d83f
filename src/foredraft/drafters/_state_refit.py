"""Medusa heads that follow the texts: what their lm_heads read gets a linear correction, learned while texts are written.

Each head h aims at the hidden state from which the target draws the token that head h drafts. That state is known a few steps later, when
the target has read so far anyway, so every place of a text is an example with no pass of its own. The correction sees what the heads see,
and the pending token, which they do not (as Hydra heads do, arXiv:2402.05109), through a random projection to few numbers.

States that are closer are not always drafts that stand more often: where the heads know a text well, the correction may do harm. So it is
used where its drafts are accepted more often than those of the heads as they are.
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
from foredraft.drafters._two_ways import TwoWays
from foredraft.drafters.refit_schedule import RefitSchedule
from foredraft.engine.proposal import DraftRequest
from foredraft.heads import MedusaHead

MAX_EXAMPLES = 16
NUM_INPUTS = 128
_SEED = 0
_AS_THEY_ARE = 0


class _Examples(NamedTuple):
    """hidden: [n, H]. pending: [n, E], the embeddings of the tokens behind. wanted: [n, heads, H]."""

    hidden: Tensor
    pending: Tensor
    wanted: Tensor


class StateRefit:
    """One for all texts of a drafter: what one text teaches serves the next. A request without prefix_caching leaves nothing behind,
    here neither.

    schedule: when to learn; at most MAX_EXAMPLES places each time, the newest of each text.
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
        self._ways = TwoWays()
        self._way = 0

    def states(self, requests: Sequence[DraftRequest], hidden: Tensor) -> Tensor:
        """What the lm_heads shall read, after learning where that is due. hidden: [len(requests), H], of the last token that the target
        has read -> [len(requests), heads, H]"""
        if self.schedule.is_due:
            self._learn(requests)
        self._way, hidden = self._ways.choose(requests), hidden.to(self._head.dtype)
        if self._way == _AS_THEY_ARE:
            return self._head.states(hidden)
        pending = self._embedded([request.tokens[_num_read(request)] for request in requests])
        return self._corrected(hidden, self._inputs(hidden, pending))

    def remember(self, drafts: Sequence[Draft]) -> None:
        """What was drafted from these states."""
        for draft in drafts:
            self._ways.remember(draft.request, draft.ids, draft.parents, self._way)

    def _learn(self, requests: Sequence[DraftRequest]) -> None:
        """From what the target has read since the last time."""
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
        # in float32: in few bits so many rows are slow where the processor has no products of them
        errors = wanted - self._corrected(hidden.float(), inputs)
        self._correction.learn(inputs, errors.flatten(1))
        self.schedule.record(len(hidden), time.perf_counter() - started)

    def forget(self, seq_ids: Sequence[int]) -> None:
        self._ways.forget(seq_ids)
        for seq_id in seq_ids:
            self._num_learned.pop(seq_id, None)

    def _examples(self, request: DraftRequest, at_most: int) -> list[_Examples]:
        """The newest that were not learned from yet; none or one block."""
        assert request.features is not None
        num_heads = self._head.config.num_heads
        end = _num_read(request) - num_heads  # behind the last place whose wanted states are all there
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
    """Tokens that the target has read: the next one is the pending token."""
    assert request.features is not None
    return len(request.features)
