"""Incremental detokenization: no text is lost, broken or released too early."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from foredraft.text.detokenizer import IncrementalDecoder
from tests.text.toy_tokenizers import (
    BAD,
    TEXTS,
    build,
    byte_id,
    byte_level_id,
    decode,
    encode,
    examples,
    expected_text,
    ids_of,
)


def pieces(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int], skip: bool) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, prompt_ids=prompt)
    return [*[decoder.push(i) for i in output], decoder.flush()]


@examples(80)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_text_of_all_tokens(name: str, data: st.DataObject, skip: bool) -> None:
    prompt, output = data.draw(ids_of(name, 30)), data.draw(ids_of(name))
    assert "".join(pieces(build(name), prompt, output, skip)) == expected_text(build(name), prompt, output, skip)


@examples(200)
@given(st.lists(st.sampled_from([*"ab .'", " n't", " 'm", " 've", " 're", " ' ", " 's"]), max_size=12).map("".join))
def test_text_that_clean_up_may_remove_is_not_released(text: str) -> None:
    tokenizer = build("characters, cleaned")
    output = encode(tokenizer, text)
    assert "".join(pieces(tokenizer, [], output, True)) == expected_text(tokenizer, [], output, True)


@pytest.mark.parametrize("num_spaces", [1, 7, 8, 9, 17, 40, 90])
@pytest.mark.parametrize("num_in_prompt", [0, 1, 8, 9, 30])
def test_spaces_survive_a_decoder_that_strips_them(num_spaces: int, num_in_prompt: int) -> None:
    tokenizer = build("slow, stripped")
    prompt, output = [4, *[2] * num_in_prompt], [*[2] * num_spaces, 4, 2, 4]
    assert "".join(pieces(tokenizer, prompt, output, True)) == " " * (num_in_prompt + num_spaces) + "b b"


@examples(60)
@given(data=st.data(), skip=st.booleans())
def test_blocks_give_the_same_text_as_single_tokens(name: str, data: st.DataObject, skip: bool) -> None:
    prompt, output = data.draw(ids_of(name, 12)), data.draw(ids_of(name))
    decoder = IncrementalDecoder(build(name), skip_special_tokens=skip, prompt_ids=prompt)
    rest, text = output, ""
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        text += decoder.extend(rest[:size])
        rest = rest[size:]
        text_so_far = text + decoder.tail
        one_by_one = IncrementalDecoder(build(name), skip_special_tokens=skip, prompt_ids=prompt)
        read = "".join([one_by_one.push(i) for i in output[: len(output) - len(rest)]])
        assert (text, text_so_far) == (read, read + one_by_one.tail)
    assert text + decoder.flush() == expected_text(build(name), prompt, output, skip)


@examples(80)
@given(prompt=TEXTS, text=TEXTS)
def test_no_broken_character_is_ever_released(byte_name: str, prompt: str, text: str) -> None:
    assume(BAD not in text)
    tokenizer = build(byte_name)
    released = pieces(tokenizer, encode(tokenizer, prompt), encode(tokenizer, text), False)
    assert BAD not in "".join(released)


def test_output_of_a_byte_level_tokenizer_does_not_depend_on_the_prompt() -> None:
    tokenizer = build("byte-level")
    output = encode(tokenizer, " the cat 😀")
    for prompt in ("", "Once", "Once ", "😀"):
        assert "".join(pieces(tokenizer, encode(tokenizer, prompt), output, True)) == decode(tokenizer, output, True)


def test_a_character_over_several_tokens_appears_when_it_is_complete() -> None:
    tokenizer = build("slow bytes")
    assert pieces(tokenizer, [], encode(tokenizer, "é😀"), True) == ["", "é", "", "", "", "😀", ""]


def test_a_character_begun_in_the_prompt_belongs_to_the_output() -> None:
    tokenizer = build("byte-level")
    ids = [token_id for byte in "éa".encode() for token_id in byte_level_id(tokenizer, byte)]
    assert "".join(pieces(tokenizer, ids[:1], ids[1:], True)) == "éa"


@pytest.mark.parametrize("which", ["byte-level", "byte-fallback"])
def test_an_incomplete_character_is_released_at_the_end(which: str) -> None:
    tokenizer = build(which)
    start = encode(tokenizer, "a") + (
        byte_level_id(tokenizer, 0xC3)
        if which == "byte-level"
        else [cast(int, tokenizer.convert_tokens_to_ids("<0xC3>"))]
    )
    released = pieces(tokenizer, [], start, True)
    assert released[-1] == BAD
    assert "".join(released) == decode(tokenizer, start, True)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    decoder.extend(start)
    assert (decoder.flush(), decoder.flush()) == (BAD, "")


def test_ids_past_the_vocabulary_have_no_text(name: str) -> None:
    tokenizer = build(name)
    if name == "slow bytes":
        return  # it decodes any id to some text
    output = encode(tokenizer, "cat")
    padded = [output[0], len(tokenizer) + 7, *output[1:], 2**31]
    assert "".join(pieces(tokenizer, [], padded, True)) == decode(tokenizer, output, True)


@pytest.mark.parametrize("which", ["byte-level", "byte-fallback", "metaspace", "characters, cleaned", "slow bytes"])
@pytest.mark.parametrize("kind", ["bad bytes", "good bytes", "one token", "special", "special and text"])
def test_cost_per_token_is_bounded_for_any_text(which: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build(which)
    one = {
        "bad bytes": [byte_id(tokenizer, byte) for byte in (0xFF, 0x80, 0xF0, 0x9F)],
        "good bytes": [byte_id(tokenizer, byte) for byte in "日".encode()],
        "one token": [4],
        "special": [0],
        "special and text": [0] * 9 + [4],
    }[kind]
    num_decoded = 0
    real = IncrementalDecoder._decode

    def counting(self: IncrementalDecoder, token_ids: list[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return real(self, token_ids)

    monkeypatch.setattr(IncrementalDecoder, "_decode", counting)
    output = one * (3000 // len(one))
    pieces(tokenizer, [], output, True)
    # ByT5 silently drops bad bytes, so there the window may grow to its bound; otherwise it stays short.
    assert num_decoded / len(output) < (300 if which == "slow bytes" else 60)


def test_a_long_run_of_byte_tokens_streams_before_it_ends() -> None:
    tokenizer = build("byte-fallback")
    text = "日本" * 60
    output = encode(tokenizer, text)
    released = pieces(tokenizer, [], output, True)
    assert len("".join(released[:-100])) > 60
    assert "".join(released).strip() == text
    # If such a run breaks late, the released text stays valid.
    broken = "".join(pieces(tokenizer, [], [*output, byte_id(tokenizer, 0xFF), *encode(tokenizer, "a")], True))
    assert broken.lstrip() == text + BAD + " a"
    # The run may also be the end of a prompt.
    for cut in (1, 2, 3):
        assert "".join(pieces(tokenizer, output[:-cut], output[-cut:], True)) == "本"


def test_a_byte_token_in_a_prompt_is_not_output() -> None:
    tokenizer = build("byte-fallback")
    newline = byte_id(tokenizer, 0x0A)
    prompt = [*encode(tokenizer, "hello"), newline]
    assert pieces(tokenizer, prompt, encode(tokenizer, "hello"), True)[0] == " hello"
    assert "".join(pieces(tokenizer, prompt, [newline, newline], True)) == "\n\n"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_shown_or_skipped(skip: bool) -> None:
    tokenizer = build("byte-level")
    ids = [*encode(tokenizer, "a"), 0, *encode(tokenizer, "<tool>b"), 0]
    assert "".join(pieces(tokenizer, [], ids, skip)) == ("a<tool>b" if skip else "a<eos><tool>b<eos>")


def test_a_clone_is_independent() -> None:
    tokenizer = build("byte-fallback")
    ids = encode(tokenizer, "a日a")
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=True)
    first = decoder.extend(ids[:3])
    twin = decoder.clone()
    decoder.clone().push(ids[3])
    assert decoder.tail == twin.tail == ""
    assert first + decoder.extend(ids[3:]) + decoder.flush() == first + twin.extend(ids[3:]) + twin.flush() == "a日a"
