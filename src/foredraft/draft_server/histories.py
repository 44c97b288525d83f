"""The histories that clients sent: the most recently used, as many as fit."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

import torch

from foredraft.engine.proposal import DraftRequest
from foredraft.remote.histories import NOTHING, checksum_of, unpacked
from foredraft.remote.messages import AskedRow, Sampling
from foredraft.sampling import Sampler, SamplingParams

IDLE_SECONDS = 60.0
MOST_SEQUENCES = 4096
MOST_TOKENS = 1 << 23


class History:
    """The history of one client's sequence. seq_id: the drafter's number for it."""

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.tokens: list[int] = []
        self.checksum = NOTHING
        self.used_at = 0.0
        self._key: object = None
        self._sampler: Sampler | None = None

    @property
    def shares_prefix(self) -> bool:
        """Whether other sequences may reuse what the drafter has read for this one."""
        return self._sampler is not None and self._sampler.params.prefix_caching

    def continues(self, row: AskedRow) -> bool:
        """Whether this is the history that the row's tokens continue."""
        return (row.start, row.checksum) == (len(self.tokens), self.checksum)

    def read(self, row: AskedRow) -> None:
        self.tokens += unpacked(row.tokens)
        self.checksum = checksum_of(row.tokens, self.checksum)

    def request(self, row: AskedRow) -> DraftRequest:
        """Raises ForedraftError for sampling parameters that are out of range."""
        return DraftRequest(self.seq_id, self.tokens, row.max_len, self._sampler_for(row))

    def _sampler_for(self, row: AskedRow) -> Sampler:
        key = (row.prompt_len, row.shares_prefix, row.sampling)
        if self._sampler is None or key != self._key:
            params, child = _params_of(row.sampling, prefix_caching=row.shares_prefix)
            self._sampler, self._key = Sampler(params, range(row.prompt_len), torch.Generator(), child=child), key
        return self._sampler


class Histories:
    """drop: called for each history that is forgotten. clock: in seconds."""

    def __init__(
        self,
        drop: Callable[[History], None],
        *,
        most_sequences: int = MOST_SEQUENCES,
        most_tokens: int = MOST_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drop = drop
        self._most_sequences = most_sequences
        self._most_tokens = most_tokens
        self._clock = clock
        self._held: OrderedDict[tuple[bytes, int], History] = OrderedDict()
        self._seq_ids = count()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def updated(self, client: bytes, row: AskedRow) -> History | None:
        """The history, extended by the row's tokens. None if the row does not continue what is held, or there is no room for a new
        history: the client must send all of it again."""
        history = self._held.get((client, row.seq_id))
        if history is not None and not history.continues(row):
            self.forget(client, row.seq_id)
            history = None
        if history is None:
            if row.start or self._is_full:
                return None
            history = self._held[client, row.seq_id] = History(next(self._seq_ids))
        self._held.move_to_end((client, row.seq_id))
        history.used_at = self._clock()
        history.read(row)
        self._num_tokens += len(row.tokens) // 4
        return history

    def forget(self, client: bytes, seq_id: int) -> None:
        history = self._held.pop((client, seq_id), None)
        if history is not None:
            self._num_tokens -= len(history.tokens)
            self._drop(history)

    def make_room(self) -> None:
        """Forget histories that were idle for IDLE_SECONDS and, while there are too many, the least recently used ones."""
        oldest_kept = self._clock() - IDLE_SECONDS
        while self._held:
            key, history = next(iter(self._held.items()))
            if not self._is_full and history.used_at >= oldest_kept:
                return
            self.forget(*key)

    @property
    def _is_full(self) -> bool:
        return len(self._held) > self._most_sequences or self._num_tokens > self._most_tokens


def _params_of(sampling: Sampling | None, *, prefix_caching: bool) -> tuple[SamplingParams, int]:
    if sampling is None:
        return SamplingParams(temperature=0.0, prefix_caching=prefix_caching).resolve({}), 0
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        verification="coupled",
        prefix_caching=prefix_caching,
    )
    return params.resolve({}), sampling.child
