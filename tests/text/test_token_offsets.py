"""The offsets of tokens are where their texts begin in the whole text."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import assume, given
from hypothesis import strategies as st

from foredraft.text.token_offsets import TokenOffsets
from tests.text.toy_tokenizers import BAD, TEXTS, build, byte_id, encode, examples, expected_text, ids_of


def offsets_of(name: str, ids: list[int], prompt: list[int] | None = None, *, skip: bool = True) -> list[int]:
    return TokenOffsets(build(name), skip_special_tokens=skip, prompt_ids=prompt or []).of(ids)


@examples(60)
@given(prompt=TEXTS, text=TEXTS)
def test_a_token_begins_where_the_whole_characters_before_it_end(byte_name: str, prompt: str, text: str) -> None:
    assume(BAD not in prompt + text)
    tokenizer = build(byte_name)
    prompt_ids, ids = encode(tokenizer, prompt), encode(tokenizer, text)
    shown = [expected_text(tokenizer, prompt_ids, ids[:count], True).rstrip(BAD) for count in range(len(ids))]
    # of a run of byte tokens with an unfinished character, all characters are shown as U+FFFD
    assert offsets_of(byte_name, ids, prompt_ids) == list(accumulate(map(len, shown), max))


def test_parts_of_a_character_begin_where_it_begins(byte_name: str) -> None:
    tokenizer = build(byte_name)
    ids = [byte_id(tokenizer, byte) for byte in "é😀".encode()]
    assert offsets_of(byte_name, ids) == [0, 0, 1, 1, 1, 1]


def test_a_token_after_an_invalid_byte_begins_after_it() -> None:
    tokenizer = build("byte-level")
    ids = [byte_id(tokenizer, byte) for byte in b"a\xf0\x9fb\xc3\xc3\xa9c"]
    text = expected_text(tokenizer, [], ids, True)
    shown = {offset: text[offset] for offset in offsets_of("byte-level", ids)}
    assert list(shown.values()) == ["a", BAD, "b", BAD, "é", "c"]


def test_a_special_token_takes_room_only_if_it_is_shown() -> None:
    tokenizer = build("byte-level")
    ids = [*encode(tokenizer, "a"), tokenizer.eos_token_id, *encode(tokenizer, "b")]
    assert offsets_of("byte-level", ids) == [0, 1, 1]
    assert offsets_of("byte-level", ids, skip=False) == [0, 1, 1 + len("<eos>")]


def test_a_space_that_the_decoder_strips_takes_no_room() -> None:
    ids = encode(build("byte-fallback"), "hello a")
    assert offsets_of("byte-fallback", ids) == [0, len("hello")]


@examples(60)
@given(data=st.data(), skip=st.booleans())
def test_offsets_do_not_depend_on_when_tokens_arrive(name: str, data: st.DataObject, skip: bool) -> None:
    prompt, ids = data.draw(ids_of(name, 12)), data.draw(ids_of(name))
    whole = offsets_of(name, ids, prompt, skip=skip)
    assert whole == sorted(whole)
    growing = TokenOffsets(build(name), skip_special_tokens=skip, prompt_ids=prompt)
    for count in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5))):
        assert growing.of(ids[:count]) == whole[:count]
