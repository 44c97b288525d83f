"""Keys and addresses: bad ones are refused in one line before connecting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ForedraftError
from foredraft.remote import VARIABLE, DraftServerAccess, VocabularyIdentity, read_key
from foredraft.remote.keys import KeyPairs

KEY = "0123456789abcdef"


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(f"  {KEY}\n")
    monkeypatch.setenv(VARIABLE, KEY[::-1])
    assert read_key(file) == KEY.encode()
    assert read_key(None) == KEY[::-1].encode()


@pytest.mark.parametrize(("content", "words"), [("", "holds no key"), ("short", "has 5 characters: give at least 16")])
def test_a_missing_or_bad_key_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: str
) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    monkeypatch.setenv(VARIABLE, content)
    for where in (file, None):
        with pytest.raises(ForedraftError, match=words):
            read_key(where)
    with pytest.raises(ForedraftError, match="cannot be read"):
        read_key(tmp_path / "nowhere")


def test_each_key_gives_different_key_pairs() -> None:
    pytest.importorskip("zmq")
    pairs = [KeyPairs.of(key) for key in (b"a" * 16, b"b" * 16)]
    assert pairs[0] == KeyPairs.of(b"a" * 16)
    assert len({part for each in pairs for pair in each for part in pair}) == 8


@pytest.mark.parametrize(
    "given",
    [
        "somewhere",
        "tcp://host",
        "http://host:1",
        7,
        {"key_file": "k"},
        {"address": "tcp://host:1", "key": "secret"},
        {"address": "tcp://host:1", "max_wait": 0},
        {"address": "tcp://host:1", "max_wait": float("inf")},
        {"address": "tcp://host:1", "max_wait": True},
    ],
)
def test_bad_draft_server_settings_are_refused(given: Any) -> None:
    with pytest.raises(ForedraftError, match="draft_server") as caught:
        DraftServerAccess.of(given)
    assert "\n" not in str(caught.value)


def test_an_address_is_enough() -> None:
    assert DraftServerAccess.of(None) is None
    assert DraftServerAccess.of("tcp://host:1") == DraftServerAccess("tcp://host:1")
    assert DraftServerAccess.of({"address": "tcp://[::1]:1", "max_wait": 2}) == DraftServerAccess(
        "tcp://[::1]:1", None, 2
    )


class Tokenizer:
    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self._tokens)}


def test_vocabularies_are_compared_by_tokens_or_else_by_size() -> None:
    def identity(size: int, *tokens: str) -> VocabularyIdentity:
        return VocabularyIdentity.of(size, Tokenizer(*tokens) if tokens else None)  # type: ignore[arg-type]

    assert identity(2, "a", "b").agrees_with(identity(640, "a", "b")), "padding is no difference"
    assert not identity(2, "a", "b").agrees_with(identity(2, "b", "a"))
    assert identity(100).agrees_with(identity(612, "a"))
    assert not identity(100).agrees_with(identity(613))
