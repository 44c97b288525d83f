"""Drafts from another process, on the same machine or another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from foredraft.drafters._requirements import missing_for
from foredraft.drafters.context import DrafterContext
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.remote.connection import Connection
from foredraft.remote.histories import Addition, SentHistories
from foredraft.remote.keys import read_key
from foredraft.remote.messages import MOST_DRAFT, MOST_ROWS, AskedRow, Sampling
from foredraft.remote.patience import Patience
from foredraft.remote.sockets import MOST_ASKED_BYTES, Caller
from foredraft.sampling import Pending, SamplingSpec

_GREETING = 10.0
_ROW_BYTES, _BYTES_BESIDE_ROWS = 160, 1 << 16
"""Upper bounds in bytes: of a row without its tokens, and of a message without its rows."""


class RemoteDrafter:
    """Asks a draft server (`foredraft draft-server`), and waits no longer than its patience allows. If the answer is late, broken or
    missing, nothing is drafted.

    Its draft tokens are certain: for greedy and unseeded requests the server's likeliest ones, for seeded requests those that the
    server draws with the request's own noise. So decoding is lossless whatever the server does. The server does not know penalties,
    biases and masks, which costs acceptance.
    """

    def __init__(
        self,
        connection: Connection,
        patience: Patience,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._connection = connection
        self._patience = patience
        self._vocab_size = vocab_size
        self._clock = clock
        self._histories = SentHistories()
        self._forgotten: list[int] = []

    @classmethod
    def build(cls, context: DrafterContext) -> RemoteDrafter:
        """Raises ForedraftError if no server answers, or the server refuses this vocabulary."""
        access, vocabulary = context.draft_server, context.vocabulary
        if access is None or vocabulary is None:
            raise missing_for("remote")
        connection = Connection(Caller(access.address, read_key(access.key_file)), access.address, vocabulary)
        connection.greet(_GREETING)
        return cls(connection, Patience(access.max_wait), context.vocab_size)

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        return self.begin(requests).resolve()

    def begin(self, requests: list[DraftRequest]) -> Pending[Proposal]:
        """Send the request without waiting; resolving the result waits for the answer."""
        self._patience.begin()
        rows = self._asked_rows(requests) if self._may_ask(requests) else []
        if not rows or not self._connection.ask(rows, self._forgotten):
            return Pending([], lambda _: self._proposal(requests, {}))
        self._forgotten = []
        for row in rows:
            self._histories.sent(row.seq_id, Addition(row.start, row.checksum, row.tokens))
        return Pending([], lambda _: self._proposal(requests, self._answered(rows)))

    def forget(self, seq_ids: list[int]) -> None:
        """Forget these sequences. The next request informs the server."""
        self._forgotten += [seq_id for seq_id in seq_ids if self._histories.forget(seq_id)]
        del self._forgotten[:-MOST_ROWS]  # a server forgets unused sequences by itself

    def close(self) -> None:
        self._connection.close()

    def _may_ask(self, requests: Sequence[DraftRequest]) -> bool:
        is_wanted = any(request.max_len for request in requests)
        return is_wanted and not self._patience.is_pausing and self._connection.is_free()

    def _asked_rows(self, requests: Sequence[DraftRequest]) -> list[AskedRow]:
        """The rows of the requests that want a draft, as many as fit into one message; the others are asked for in a later step."""
        rows: list[AskedRow] = []
        room = MOST_ASKED_BYTES - _BYTES_BESIDE_ROWS
        for request in requests:
            if not request.max_len or len(rows) == MOST_ROWS:
                continue
            addition = self._histories.addition(request.seq_id, request.tokens)
            room -= _ROW_BYTES + len(addition.tokens)
            if room < 0:
                break
            rows.append(_asked_row(request, addition))
        return rows

    def _answered(self, rows: Sequence[AskedRow]) -> dict[int, Sequence[int]]:
        """The valid drafts that arrived in time, by sequence."""
        started = self._clock()
        answer = self._connection.receive(self._patience.limit(max(row.max_len for row in rows)))
        if answer is None:
            self._patience.late(self._clock() - started)
            return {}
        self._patience.in_time()
        if len(answer.drafts) != len(rows):
            return {}
        drafts: dict[int, Sequence[int]] = {}
        for row, draft in zip(rows, answer.drafts, strict=True):
            if draft is None:
                self._histories.forget(row.seq_id)
            elif len(draft) <= row.max_len and max(draft, default=0) < self._vocab_size:
                drafts[row.seq_id] = draft
        return drafts

    def _proposal(self, requests: Sequence[DraftRequest], drafts: Mapping[int, Sequence[int]]) -> Proposal:
        self._patience.end()
        return Proposal.certain([drafts.get(request.seq_id, ()) if request.max_len else () for request in requests])


def _asked_row(request: DraftRequest, addition: Addition) -> AskedRow:
    sampler = request.sampler
    return AskedRow(
        request.seq_id,
        *addition,
        min(request.max_len, MOST_DRAFT),
        sampler.prompt_len,
        sampler.params.prefix_caching,
        _sampling_of(sampler.spec),
    )


def _sampling_of(spec: SamplingSpec) -> Sampling | None:
    """The sampling settings to send; None for a request without shared noise, for which the likeliest tokens are accepted most often."""
    if not spec.is_coupled:
        return None
    top_k, top_p, min_p = spec.truncation or (0, 1.0, 0.0)
    return Sampling(float(spec.temperature), top_k, float(top_p), float(min_p), spec.seed, spec.child)
