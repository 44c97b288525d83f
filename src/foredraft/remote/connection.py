"""The client's end of a connection: it asks one question at a time, and accepts only the answer to that question."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from foredraft.errors import ForedraftError, VocabularyError
from foredraft.remote.messages import Answer, Ask, AskedRow, MalformedMessage, OtherProtocol
from foredraft.remote.vocabulary import VocabularyIdentity

logger = logging.getLogger("foredraft")

_CONNECTING = 0.01
"""Seconds between two attempts to greet a server that is not up yet."""
_RETRY, _MOST_RETRY = 0.25, 2.0
"""Seconds until a question counts as lost. They double after each lost question that was sent, up to the second number."""
_MOST_READ = 64
"""Frames read in one call, so that a server that sends more than it was asked for cannot hold up a step."""


class Calls(Protocol):
    """sockets.Caller, or a test's stand-in for it."""

    def receive(self, timeout: float) -> bytes | None: ...
    def send(self, frame: bytes) -> bool: ...
    def close(self) -> None: ...


class Connection:
    """Asks a draft server. A question that is not answered in time stays open, and no drafts are asked for while it is: a slow or dead
    server accumulates no queue. Once a question counts as lost, empty ones follow until the server answers. Answers to any question but
    the open one are discarded.

    address: for log and error messages. clock: in seconds.
    """

    def __init__(
        self,
        calls: Calls,
        address: str,
        vocabulary: VocabularyIdentity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._address = address
        self._vocabulary = vocabulary
        self._clock = clock
        self._steps = count(1)
        self._open: int | None = None
        self._sent_at = 0.0
        self._retry = _RETRY
        self._num_lost = 0
        self._is_up = True

    def greet(self, timeout: float) -> None:
        """Wait until the server answers. Raises ForedraftError if it does not, and VocabularyError if it refuses."""
        end = self._clock() + timeout
        while self._clock() < end:
            is_sent = self._ask((), ())
            answer = self.receive(_RETRY if is_sent else _CONNECTING)
            if answer is not None and answer.refusal:
                raise VocabularyError(f"the draft server at {self._address} refuses to draft: {answer.refusal}")
            if answer is not None:
                return
        raise ForedraftError(
            f"no draft server answers at {self._address}: start `foredraft draft-server` there, with the same key as here"
        )

    def is_free(self) -> bool:
        """Whether the server has answered the last question. If that counts as lost, ask again whether the server is up."""
        if self._open is not None:
            self.receive(0.0)
        if self._open is None:
            return True
        if self._clock() - self._sent_at >= self._retry:
            self._num_lost += 1
            if self._num_lost > 1:
                self._note(is_up=False)
            is_sent = self._ask((), ())
            self._retry = min(2 * self._retry, _MOST_RETRY) if is_sent else _RETRY
        return False

    def ask(self, rows: Sequence[AskedRow], forgotten: Sequence[int]) -> bool:
        """Send a question -> False if no server is connected."""
        return self._ask(rows, forgotten)

    def receive(self, timeout: float) -> Answer | None:
        """The answer to the open question; None if it does not arrive within `timeout` seconds."""
        end = self._clock() + timeout
        for _ in range(_MOST_READ):
            frame = self._calls.receive(end - self._clock())
            if frame is None:
                return None
            answer = self._read(frame)
            if answer is not None and answer.step == self._open:
                self._open, self._retry, self._num_lost = None, _RETRY, 0
                self._note(is_up=not answer.refusal, why=answer.refusal)
                return answer
        return None

    def close(self) -> None:
        self._calls.close()

    def _ask(self, rows: Sequence[AskedRow], forgotten: Sequence[int]) -> bool:
        """A question that could not be sent is open too, and is asked again like a lost one."""
        self._open, self._sent_at = next(self._steps), self._clock()
        return self._calls.send(Ask(self._open, self._vocabulary, forgotten, rows).pack())

    def _read(self, frame: bytes) -> Answer | None:
        try:
            return Answer.unpack(frame)
        except OtherProtocol as other:
            return Answer(other.step, f"it uses {other}; install the same version of foredraft on both sides")
        except MalformedMessage as error:
            logger.debug("the draft server at %s sent a frame that was discarded: %s", self._address, error)
            return None

    def _note(self, *, is_up: bool, why: str = "") -> None:
        """Log once when the server goes down, and once when it is back."""
        if is_up is self._is_up:
            return
        self._is_up = is_up
        if is_up:
            logger.warning("the draft server at %s answers again", self._address)
        else:
            reason = f"refuses to draft ({why})" if why else "does not answer"
            logger.warning("the draft server at %s %s: texts continue without its drafts", self._address, reason)
