"""The bytes of single tokens."""

from __future__ import annotations

import pytest

from foredraft.vocabulary import TokenBytes
from tests.text.toy_tokenizers import build, byte_id, encode


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_bytes_of_the_parts_of_a_character_join_to_it(name: str) -> None:
    token_bytes = TokenBytes(build(name))
    data = "é😀".encode()
    assert [token_bytes.of(byte_id(build(name), byte)) for byte in data] == [bytes([byte]) for byte in data]


def test_bytes_of_tokens_join_to_the_text() -> None:
    token_bytes, ids = TokenBytes(build("byte-level")), encode(build("byte-level"), "the cat 日本語 😀")
    assert b"".join(token_bytes.of(index) or b"" for index in ids).decode() == "the cat 日本語 😀"


@pytest.mark.parametrize("name", ["word-piece", "slow bytes"])
def test_bytes_are_not_known_for_other_vocabularies(name: str) -> None:
    assert TokenBytes(build(name)).of(5) is None


def test_bytes_are_not_known_beyond_the_vocabulary() -> None:
    token_bytes = TokenBytes(build("byte-level"))
    assert token_bytes.of(len(build("byte-level"))) is token_bytes.of(-1) is None
