"""Ids as bytes and bytes as ids, for every kind of vocabulary: encoding gives the text's bytes, or a beginning of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import VocabularyError
from foredraft.vocabulary import ByteVocabulary
from foredraft.vocabulary.byte_vocabulary import num_pending, num_whole
from tests.text.toy_tokenizers import IN_SHARED, MODELS, READ_BYTES, TEXTS, build, encode, examples
from tests.vocabulary.vocabularies import OWN, SHARED, vocabulary

NAMES = [*OWN, *SHARED]
BYTES = st.one_of(TEXTS.map(str.encode), st.binary(max_size=12))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param in IN_SHARED and not MODELS.is_dir():
        pytest.skip("needs ../shared/models")
    return str(request.param)


def test_the_ids_of_a_text_are_its_bytes(name: str) -> None:
    @given(TEXTS)
    @examples(100)
    def check(text: str) -> None:
        own = vocabulary(name)
        data = text.encode()
        written = own.joined(own.write(data))
        assert data.startswith(written)
        if name in READ_BYTES:
            assert written == data

    check()


def test_bytes_that_are_not_text_are_encoded_up_to_the_first_invalid_one(name: str) -> None:
    @given(BYTES)
    @examples(100)
    def check(data: bytes) -> None:
        own = vocabulary(name)
        assert data.startswith(own.joined(own.write(data)))

    check()


def test_every_text_can_be_spelt_and_the_ends_match_the_ids(name: str) -> None:
    @given(BYTES)
    @examples(100)
    def check(data: bytes) -> None:
        own = vocabulary(name)
        ids, ends = own.spell(data)
        assert len(ids) == len(ends)
        assert ends == sorted(ends)
        assert not ends or ends[-1] <= len(data)
        if name in READ_BYTES:
            assert [own.joined(ids[: i + 1]) for i in range(len(ids))] == [data[:end] for end in ends]

    check()


def test_nothing_is_added_to_a_text_and_the_tokenizer_is_not_changed() -> None:
    tokenizer: Any = build("byte-fallback")
    before = tokenizer.backend_tokenizer.to_str()
    own = ByteVocabulary(tokenizer)
    assert own.bytes_of[own.encode("hello")[0]] == b"hell" or own.joined(own.encode("hello")) == b"hello"
    assert tokenizer.backend_tokenizer.to_str() == before
    assert own.prefix_space == b" "
    assert encode(tokenizer, "hello") == own.encode(" hello")


def test_special_tokens_have_no_text_and_their_names_in_a_text_are_text() -> None:
    own = vocabulary("byte-level")
    eos = own.roles["eos_token_id"]
    assert own.bytes_of[eos] is None
    assert own.special[eos] == "<eos>"
    assert own.joined([eos]) == b""
    assert eos not in own.encode("a <eos> b")
    assert own.joined(own.encode("a <eos> b")) == b"a <eos> b"


def test_an_added_token_has_its_text() -> None:
    own = vocabulary("byte-level")
    (index,) = own.encode("<tool>")
    assert own.bytes_of[index] == b"<tool>"


def test_prefix_ids_and_prefix_space_are_detected() -> None:
    if not MODELS.is_dir():
        pytest.skip("needs ../shared/models")
    assert (vocabulary("stories260K").prefix_ids, vocabulary("stories260K").prefix_space) == ((1,), b" ")
    assert (vocabulary("target").prefix_ids, vocabulary("target").prefix_space) == ((0,), b"")


@pytest.mark.parametrize(
    ("name", "reason"), [("word-piece", "spaces between words"), ("slow bytes", "written in Python")]
)
def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused(name: str, reason: str) -> None:
    with pytest.raises(VocabularyError, match=reason):
        ByteVocabulary(build(name))


@pytest.mark.parametrize(
    ("data", "whole", "pending"),
    [
        (b"abc", 3, 0),
        ("é".encode(), 2, 0),
        ("aé".encode()[:-1], 1, 1),
        ("😀".encode()[:3], 0, 3),
        (b"a\xff", 1, 0),
        (b"a\x80", 1, 0),
        (b"", 0, 0),
    ],
)
def test_whole_and_pending_bytes_are_counted(data: bytes, whole: int, pending: int) -> None:
    assert (num_whole(data), num_pending(data)) == (whole, pending)
