"""Answers the questions of targets in other processes with one drafter."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import NamedTuple, TypeVar

from foredraft.draft_server.histories import Histories, History
from foredraft.engine.contract import check_drafter
from foredraft.engine.drafter_group import RetainingDrafter
from foredraft.engine.proposal import Drafter, DraftRequest, shares_cache, taps_of
from foredraft.errors import DrafterError, ForedraftError
from foredraft.remote.messages import PROTOCOL, Answer, Ask, AskedRow, MalformedMessage, OtherProtocol
from foredraft.remote.sockets import Listener
from foredraft.remote.vocabulary import VocabularyIdentity
from foredraft.utils.isolation import Shield

logger = logging.getLogger("foredraft")

T = TypeVar("T")

_POLL_SECONDS = 0.2
_MOST_CLIENTS = 64
"""The most questions that are answered together."""


class _Question(NamedTuple):
    client: bytes
    ask: Ask


class DraftServer:
    """Answers in the thread that calls `run`. Questions that wait at the same time form one batch for the drafter, so a server that
    several targets share drafts for all of them at once.

    drafter: must read neither hidden states nor keys and values of the target. vocabulary: of its ids; None: it copies ids and
    serves any vocabulary.

    Raises DrafterError for a drafter that reads them.
    """

    def __init__(self, drafter: Drafter, listener: Listener, vocabulary: VocabularyIdentity | None = None) -> None:
        check_drafter(drafter)
        if taps_of(drafter) or shares_cache(drafter):
            raise DrafterError(
                f"{type(drafter).__name__} reads what the target computed, which is in the target's process: use this drafter there"
            )
        self._drafter = drafter
        self._listener = listener
        self._vocabulary = vocabulary
        self._histories = Histories(self._drop)
        self._waiting: deque[_Question] = deque()
        self._stopped = threading.Event()
        self._shield = Shield()

    @property
    def address(self) -> str:
        return self._listener.address

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Answer until `stop` is called, by any thread, or until is_wanted, called a few times a second, returns False."""
        next_check = time.monotonic()
        try:
            while not self._stopped.is_set():
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _POLL_SECONDS
                    if not is_wanted():
                        return
                self.answer_waiting()
        finally:
            self._listener.close()

    def answer_waiting(self) -> None:
        """Answer the waiting questions, one of each client. If there are none, wait for one for a moment."""
        self._receive()
        self._answer(self._next_batch())
        self._histories.make_room()

    def stop(self) -> None:
        self._stopped.set()

    def _receive(self) -> None:
        """Receive the questions that have arrived, at most one batch. If none is waiting yet, wait for the first."""
        timeout = 0.0 if self._waiting else _POLL_SECONDS
        while len(self._waiting) < _MOST_CLIENTS:
            received = self._listener.receive(timeout)
            if received is None:
                return
            self._read(*received)
            timeout = 0.0

    def _read(self, client: bytes, frame: bytes) -> None:
        try:
            ask = Ask.unpack(frame)
        except OtherProtocol as other:
            self._send(
                client,
                Answer(
                    other.step, f"this server uses protocol {PROTOCOL}, but the request uses protocol {other.version}"
                ),
            )
        except MalformedMessage as error:
            logger.debug("a client sent a frame that was discarded: %s", error)
        else:
            if self._vocabulary is None or self._vocabulary.agrees_with(ask.vocabulary):
                self._waiting.append(_Question(client, ask))
            else:
                self._send(client, Answer(ask.step, "its drafter's vocabulary is not the target's"))

    def _next_batch(self) -> list[_Question]:
        """The oldest questions, at most one of each client, because a client's next question may change the same histories."""
        batch: dict[bytes, _Question] = {}
        while self._waiting and self._waiting[0].client not in batch:
            question = self._waiting.popleft()
            batch[question.client] = question
        return [*batch.values()]

    def _answer(self, batch: Sequence[_Question]) -> None:
        histories = [self._read_histories(*question) for question in batch]
        requests = [request for each in histories for request in each if request is not None]
        drafts = iter(self._drafts(requests))
        for (client, ask), each in zip(batch, histories, strict=True):
            size = ask.vocabulary.size
            rows = [None if request is None else _within(next(drafts), size) for request in each]
            self._send(client, Answer(ask.step, drafts=rows))

    def _read_histories(self, client: bytes, ask: Ask) -> list[DraftRequest | None]:
        """The draft request of each row; None if the client must send the history again."""
        for seq_id in ask.forgotten:
            self._histories.forget(client, seq_id)
        return [self._request(client, row) for row in ask.rows]

    def _request(self, client: bytes, row: AskedRow) -> DraftRequest | None:
        history = self._histories.updated(client, row)
        if history is None or not history.tokens:
            return None
        try:
            return history.request(row)
        except ForedraftError as error:
            logger.debug("a client asked for a draft with invalid parameters: %s", error)
            self._histories.forget(client, row.seq_id)
            return None

    def _drafts(self, requests: list[DraftRequest]) -> list[list[int]]:
        """The drafts. If the drafter raises, all are empty and it forgets the sequences."""
        if not requests:
            return []
        drafts = self._shielded(partial(self._propose, requests))
        if drafts is None:
            self._shielded(partial(self._drafter.forget, [request.seq_id for request in requests]))
        return [[] for _ in requests] if drafts is None else drafts

    def _propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """Only the number of drafts is checked here: the client checks the drafts themselves."""
        drafts = self._drafter.propose(requests).draft_ids
        if len(drafts) != len(requests):
            raise DrafterError(
                f"{type(self._drafter).__name__} proposed {len(drafts)} rows for {len(requests)} requests"
            )
        return drafts

    def _shielded(self, call: Callable[[], T]) -> T | None:
        """The result of the call; None if the drafter raises."""
        return self._shield.call(self._drafter, call, None)

    def _drop(self, history: History) -> None:
        """The sequence has ended, as far as the server knows. What was read for it may serve sequences with the same prefix."""
        if history.shares_prefix and isinstance(self._drafter, RetainingDrafter):
            self._shielded(partial(self._drafter.retain, history.seq_id, history.tokens))
        else:
            self._shielded(partial(self._drafter.forget, [history.seq_id]))

    def _send(self, client: bytes, answer: Answer) -> None:
        self._listener.send(client, answer.pack())


def _within(ids: list[int], size: int) -> list[int]:
    """The ids before the first one outside the target's vocabulary: the logits may be padded differently."""
    return list(takewhile(lambda token: 0 <= token < size, ids))
