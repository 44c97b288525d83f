"""The messages between a target's process and a draft server: msgpack arrays, of which the receiver checks every value.

    asked      [PROTOCOL, step, vocabulary size, vocabulary digest, forgotten ids, rows]
    a row      [id, start, checksum, new tokens, max_len, length of the prompt, shares prefixes, sampling or nil]
    sampling   [temperature, top_k, top_p, min_p, seed, child]
    answered   [PROTOCOL, step, refusal, rows]
    a row      draft tokens, or nil: send all of this history again

Tokens are four bytes each, little-endian. A question without rows asks whether the server is up. The first two fields, and the third
field of an answer, mean the same in every version of the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from foredraft.remote.histories import packed, unpacked
from foredraft.remote.vocabulary import VocabularyIdentity

PROTOCOL = 1
MOST_ROWS = 4096
MOST_DRAFT = 256
_MOST_ID = 2**31 - 1
_MOST_COUNT = 2**63 - 1
_MOST_TEXT = 512


class MalformedMessage(Exception):
    """A frame that is not a valid message. The text of the exception says why."""


class OtherProtocol(MalformedMessage):
    """A message of another protocol version. version: which one. step: of the message."""

    def __init__(self, version: int, step: int) -> None:
        super().__init__(f"protocol {version}, but this side uses protocol {PROTOCOL}")
        self.version = version
        self.step = step


class Sampling(NamedTuple):
    """How a sequence's tokens are drawn with noise that target and draft share. See SamplingParams, and SamplingSpec.child."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    child: int


class AskedRow(NamedTuple):
    """A request for one draft. seq_id: the client's number for the sequence. start, checksum, tokens: see Addition. max_len: the most
    draft tokens. prompt_len: of the sequence. shares_prefix: see SamplingParams.prefix_caching. sampling: None for the likeliest
    tokens."""

    seq_id: int
    start: int
    checksum: int
    tokens: bytes
    max_len: int
    prompt_len: int
    shares_prefix: bool = True
    sampling: Sampling | None = None

    @classmethod
    def unpack(cls, row: Any) -> AskedRow:
        seq_id, start, checksum, tokens, max_len, prompt_len, shares_prefix, sampling = _array(row, 8)
        return cls(
            _whole(seq_id),
            _whole(start),
            _whole(checksum, 2**32 - 1),
            _tokens(tokens),
            _whole(max_len, MOST_DRAFT),
            _whole(prompt_len),
            bool(_whole(shares_prefix, 1)),
            None if sampling is None else _sampling(sampling),
        )


class Ask(NamedTuple):
    """A question. step: its number, which the answer repeats. forgotten: sequences that have ended."""

    step: int
    vocabulary: VocabularyIdentity
    forgotten: Sequence[int] = ()
    rows: Sequence[AskedRow] = ()

    def pack(self) -> bytes:
        return _frame([PROTOCOL, self.step, *self.vocabulary, list(self.forgotten), list(self.rows)])

    @classmethod
    def unpack(cls, frame: bytes) -> Ask:
        """Raises MalformedMessage."""
        step, size, digest, forgotten, rows = _array(_message(frame), 5)
        vocabulary = VocabularyIdentity(_whole(size, _MOST_ID), _bytes(digest, 64))
        ids = [_whole(seq_id) for seq_id in _list(forgotten)]
        found = [AskedRow.unpack(row) for row in _list(rows)]
        if len({row.seq_id for row in found}) < len(found):
            raise MalformedMessage("a sequence occurs twice")
        return cls(step, vocabulary, ids, found)


class Answer(NamedTuple):
    """refusal: why the server drafts nothing, in one line; empty if it drafts. drafts: one for each row of the question, in order."""

    step: int
    refusal: str = ""
    drafts: Sequence[Sequence[int] | None] = ()

    def pack(self) -> bytes:
        rows = [None if draft is None else packed(draft) for draft in self.drafts]
        return _frame([PROTOCOL, self.step, self.refusal[:_MOST_TEXT], rows])

    @classmethod
    def unpack(cls, frame: bytes) -> Answer:
        """Raises MalformedMessage."""
        step, refusal, rows = _array(_message(frame), 3)
        if not isinstance(refusal, str):
            raise MalformedMessage("a refusal is not a string")
        drafts = [None if row is None else unpacked(_tokens(row)) for row in _list(rows)]
        return cls(step, " ".join(refusal.split())[:_MOST_TEXT], drafts)


def _frame(message: list[Any]) -> bytes:
    import msgpack

    frame: bytes = msgpack.packb(message)
    return frame


def _message(frame: bytes) -> list[Any]:
    """The fields after the version: the step, then the rest."""
    import msgpack

    try:
        message = msgpack.unpackb(
            frame, max_map_len=0, max_ext_len=0, max_array_len=MOST_ROWS, max_str_len=4 * _MOST_TEXT
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"not a valid message: {type(error).__name__}") from None
    if not isinstance(message, list) or len(message) < 2:
        raise MalformedMessage("not a valid message")
    version, step = (_whole(number) for number in message[:2])
    if version != PROTOCOL:
        raise OtherProtocol(version, step)
    return [step, *message[2:]]


def _array(value: Any, size: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != size:
        raise MalformedMessage(f"expected an array of {size} elements")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedMessage("expected an array")
    return value


def _whole(value: Any, most: int = _MOST_COUNT) -> int:
    """An integer from 0 to `most`."""
    if not isinstance(value, int) or not 0 <= value <= most:
        raise MalformedMessage(f"expected an integer from 0 to {most}")
    return value


def _bytes(value: Any, most: int) -> bytes:
    if not isinstance(value, bytes) or len(value) > most:
        raise MalformedMessage(f"expected at most {most} bytes")
    return value


def _tokens(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) % 4:
        raise MalformedMessage("expected tokens of four bytes each")
    return value


def _sampling(value: Any) -> Sampling:
    """Only types are checked here: SamplingParams checks the ranges."""
    temperature, top_k, top_p, min_p, seed, child = _array(value, 6)
    if not all(isinstance(number, float) for number in (temperature, top_p, min_p)) or not isinstance(seed, int):
        raise MalformedMessage("expected sampling parameters")
    return Sampling(temperature, _whole(top_k), top_p, min_p, seed, _whole(child))
