"""Valid messages are read as they were written, and all others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.remote.histories import packed
from foredraft.remote.messages import (
    MOST_DRAFT,
    PROTOCOL,
    Answer,
    Ask,
    AskedRow,
    MalformedMessage,
    OtherProtocol,
    Sampling,
)
from foredraft.remote.vocabulary import VocabularyIdentity

msgpack = pytest.importorskip("msgpack")

counts = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)
samplings = st.builds(
    Sampling,
    st.floats(0.1, 2),
    st.integers(0, 100),
    st.floats(0.1, 1),
    st.floats(0, 1),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 9),
)
rows = st.builds(
    AskedRow,
    counts,
    counts,
    st.integers(0, 2**32 - 1),
    tokens.map(packed),
    st.integers(0, MOST_DRAFT),
    counts,
    st.booleans(),
    st.none() | samplings,
)
vocabularies = st.builds(VocabularyIdentity, st.integers(1, 300_000), st.sampled_from([b"", b"d" * 16]))
asks = st.builds(
    Ask, counts, vocabularies, st.lists(counts, max_size=3), st.lists(rows, max_size=4, unique_by=lambda row: row[0])
)
answers = st.builds(Answer, counts, st.sampled_from(["", "no"]), st.lists(st.none() | tokens, max_size=4))


@given(asks)
def test_a_question_is_read_as_it_was_written(ask: Ask) -> None:
    assert Ask.unpack(ask.pack()) == ask


@given(answers)
def test_an_answer_is_read_as_it_was_written(answer: Answer) -> None:
    assert Answer.unpack(answer.pack()) == answer


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    for kind in (Ask, Answer):
        with pytest.raises(MalformedMessage):
            kind.unpack(frame)


@given(
    st.sampled_from(
        [Ask(1, VocabularyIdentity(9), [4], [AskedRow(0, 0, 0, packed([1, 2]), 4, 1)]), Answer(1, "", [[1]])]
    ),
    st.data(),
)
def test_a_broken_message_is_refused_or_read_as_another(message: Any, data: st.DataObject) -> None:
    """Whichever byte is changed, the only error is MalformedMessage."""
    frame = bytearray(message.pack())
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        type(message).unpack(bytes(frame))
    except MalformedMessage:
        return


GOOD_ROW = [0, 0, 0, b"", 4, 1, True, None]


def with_place(place: int, value: Any) -> list[Any]:
    return [*GOOD_ROW[:place], value, *GOOD_ROW[place + 1 :]]


@pytest.mark.parametrize(
    "row",
    [
        [],
        with_place(0, -1),
        with_place(0, 2.5),
        with_place(2, 2**32),
        with_place(3, "text"),
        with_place(3, b"123"),
        with_place(4, MOST_DRAFT + 1),
        with_place(6, 2),
        with_place(7, [1.0]),
        with_place(7, ["hot", 0, 1.0, 0.0, 1, 0]),
    ],
)
def test_an_invalid_row_is_refused(row: list[Any]) -> None:
    with pytest.raises(MalformedMessage):
        Ask.unpack(msgpack.packb([PROTOCOL, 1, 9, b"", [], [row]]))


def test_a_sequence_may_occur_only_once() -> None:
    with pytest.raises(MalformedMessage, match="twice"):
        Ask.unpack(msgpack.packb([PROTOCOL, 1, 9, b"", [], [GOOD_ROW, GOOD_ROW]]))


def test_another_version_is_refused_by_number() -> None:
    with pytest.raises(OtherProtocol) as caught:
        Answer.unpack(msgpack.packb([PROTOCOL + 1, 7, "something", "new"]))
    assert (caught.value.version, caught.value.step) == (PROTOCOL + 1, 7)


def test_the_text_of_a_refusal_is_one_short_line() -> None:
    refusal = Answer.unpack(msgpack.packb([PROTOCOL, 1, "a\nb" * 400, []])).refusal
    assert "\n" not in refusal
    assert len(refusal) <= 512
