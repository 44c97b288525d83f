"""Medusa heads that follow the texts: what their lm_heads read gets a linear correction, learned while texts are written.

Each head h aims at the hidden state from which the target draws the token that head h drafts. That state is known a few steps later, when
the target has read so far anyway, so every place of a text is an example with no pass of its own. The correction sees what the heads see,
and the pending token, which they do not (as Hydra heads do, arXiv:2402.05109).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foredraft.drafters._least_squares import RecursiveLeastSquares
from foredraft.drafters.refit_schedule import RefitSchedule
from foredraft.engine.proposal import DraftRequest
from foredraft.heads import MedusaHead

MAX_EXAMPLES = 16


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
        num_inputs = width + self._embedded([0]).shape[1]
        self._correction = RecursiveLeastSquares(num_inputs, num_heads * width, head.device)
        self._num_learned: dict[int, int] = {}

    def corrected(self, requests: Sequence[DraftRequest], hidden: Tensor) -> Tensor:
        """What the lm_heads shall read. hidden: [len(requests), H], of the last token that the target has read -> [len(requests), heads,
        H]"""
        pending = self._embedded([request.tokens[_num_read(request)] for request in requests])
        return self._states(hidden, self._inputs(hidden, pending))

    def learn(self, requests: Sequence[DraftRequest]) -> None:
        """From what the target has read since the last time, if it is time to."""
        if not self.schedule.is_due:
            return
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
        errors = wanted - self._states(hidden, inputs).float()
        self._correction.learn(inputs, errors.flatten(1))
        self.schedule.record(len(hidden), time.perf_counter() - started)

    def forget(self, seq_ids: Sequence[int]) -> None:
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

    @staticmethod
    def _inputs(hidden: Tensor, pending: Tensor) -> Tensor:
        return torch.cat((normalize(hidden.float()), normalize(pending.float())), dim=1)

    def _states(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """[n, heads, H], in the head's precision"""
        states = self._head.states(hidden.to(self._head.dtype))
        return states + self._correction(inputs).view(states.shape).to(states.dtype)


def _num_read(request: DraftRequest) -> int:
    """Tokens that the target has read: the next one is the pending token."""
    assert request.features is not None
    return len(request.features)
