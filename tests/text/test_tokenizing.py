"""Prompts and bad words as ids, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from foredraft.errors import ForedraftError
from foredraft.text.tokenizing import bad_words_ids, encode_prompt
from tests.text.toy_tokenizers import build, encode, fast_tokenizer


def test_prompts_have_the_tokenizers_special_tokens(shared: Path) -> None:
    tokenizer = build("target")
    assert encode_prompt(tokenizer, "def f") == [0, *encode(tokenizer, "def f")]
    assert encode_prompt(tokenizer, "") == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "prompt is empty"), (3, "must be a string"), (["a"], "not list"), ("a\ud800b", "surrogate .* character 1")],
)
def test_bad_prompts_are_refused_in_one_line(text: Any, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        encode_prompt(build("byte-level"), text)
    assert "\n" not in str(caught.value)


def test_bad_words_are_masked_with_and_without_a_space() -> None:
    tokenizer = build("byte-level")
    expect = [tuple(encode(tokenizer, text)) for text in ("cat", " cat", " rain")]
    assert bad_words_ids(tokenizer, ["cat", " cat", " rain", "cat"]) == expect
    assert bad_words_ids(tokenizer, []) == []


def test_a_text_the_tokenizer_cannot_encode_is_refused() -> None:
    tokenizer = Tokenizer(models.Unigram([("a", -1.0)], unk_id=None))
    with pytest.raises(ForedraftError, match="the tokenizer cannot encode this text: Encountered"):
        encode_prompt(fast_tokenizer(tokenizer_object=tokenizer), "b")


def test_a_bad_word_without_tokens_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"cat": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    with pytest.raises(ForedraftError, match="bad_words entry ' ' has no tokens"):
        bad_words_ids(fast_tokenizer(tokenizer_object=tokenizer), ["cat", " "])
