"""The stop rule: stop strings are found anywhere, and the text ends exactly there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from foredraft.sampling.params import SamplingParams
from foredraft.text.detokenizer import IncrementalDecoder
from foredraft.text.stream import TextStream
from tests.text.toy_tokenizers import (
    BAD,
    TEXTS,
    build,
    byte_id,
    decode,
    encode,
    examples,
    expected_text,
    ids_of,
    num_shared,
)


def run(
    stream: TextStream, ids: Sequence[int], cuts: Sequence[int] = (), *, ended: bool = True
) -> tuple[int, str, list[str]]:
    """Feed ids in blocks as an engine does. -> (how many were kept, the text, the streamed pieces)"""
    kept, streamed = 0, []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        keep = stream(ids[begin:end], begin)
        kept += end - begin if keep is None else keep
        streamed.append(stream.delta())
        if keep is not None:
            return kept, stream.text, streamed
    if ended:
        streamed.append(stream.delta(finished=True))
    return kept, stream.text, streamed


def expected(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], stop: Sequence[str], min_tokens: int, include: bool, skip: bool
) -> tuple[int, str, str | None]:
    """The stop rule by brute force: after each token search the whole text for new occurrences."""
    shown = ""
    for n in range(1, len(ids) + 1):
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        text = "".join([decoder.push(i) for i in ids[:n]]) + decoder.tail
        known = num_shared(shown, text)
        hits = [
            (begin, len(s), s)
            for s in stop
            for begin in range(len(text))
            if text.startswith(s, begin) and begin + len(s) > known
        ]
        if hits and n > min_tokens:
            begin, length, which = min(hits)
            return n, text[: begin + length * include], which
        shown = text
    return len(ids), expected_text(tokenizer, [], ids, skip), None


def cuts_of(length: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, max(1, length - 1)), max_size=8).map(lambda s: sorted(c for c in s if c < length))


@examples(60)
@given(data=st.data(), include=st.booleans(), skip=st.booleans(), min_tokens=st.integers(0, 6))
def test_the_stop_rule_equals_brute_force_however_the_ids_arrive(
    name: str, data: st.DataObject, include: bool, skip: bool, min_tokens: int
) -> None:
    tokenizer = build(name)
    ids = data.draw(st.one_of(ids_of(name, 25), TEXTS.map(lambda text: encode(tokenizer, text))))
    text = expected_text(tokenizer, [], ids, skip)
    inside = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(lambda at: text[at[0] : sum(at)])
    stops = st.one_of(inside, st.text("ab \n", max_size=3)).filter(lambda s: s and BAD not in s)
    stop = data.draw(st.lists(stops, min_size=0, max_size=3))
    cuts = data.draw(cuts_of(len(ids)))
    stream = TextStream(
        tokenizer,
        stop=stop,
        include_stop_str_in_output=include,
        min_tokens=min_tokens,
        skip_special_tokens=skip,
    )
    kept, final, streamed = run(stream, ids, cuts)
    assert (kept, final, stream.stop_reason) == expected(tokenizer, ids, stop, min_tokens, include, skip)
    assert "".join(streamed) == final
    assert stream([1, 2], kept) == 0
    assert stream.finish() == final
    assert stream.delta(True) == ""


@examples(60)
@given(data=st.data(), before=TEXTS, stop=TEXTS.filter(bool), after=TEXTS)
def test_a_stop_string_is_found_anywhere(
    byte_name: str, data: st.DataObject, before: str, stop: str, after: str
) -> None:
    tokenizer = build(byte_name)
    ids = encode(tokenizer, before + stop + after)
    text = expected_text(tokenizer, [], ids, False)
    assume(stop in text and BAD not in text)
    stream = TextStream(tokenizer, stop=[stop], skip_special_tokens=False)
    kept, final, streamed = run(stream, ids, data.draw(cuts_of(len(ids))))
    assert final == text[: text.index(stop)] == "".join(streamed)
    assert stream.stop_reason == stop
    assert stop in expected_text(tokenizer, [], ids[:kept], False)
    assert stop not in expected_text(tokenizer, [], ids[: kept - 1], False)


def test_text_is_cut_inside_tokens_and_later_ids_are_dropped() -> None:
    tokenizer = build("byte-level")
    ids = encode(tokenizer, "the cat didn't like the rain")
    stream = TextStream(tokenizer, stop=["t didn'"])
    keep = stream(ids, 0)
    assert keep is not None
    assert keep < len(ids)
    assert stream.text == "the ca"
    assert "t didn'" in decode(tokenizer, ids[:keep], True)
    assert "t didn'" not in decode(tokenizer, ids[: keep - 1], True)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = build("slow bytes")
    stream = TextStream(tokenizer, stop=["abc", "bd"])
    deltas = [(stream(encode(tokenizer, char), i), stream.delta())[1] for i, char in enumerate("xaabx")]
    assert deltas == ["x", "", "a", "", "abx"]
    assert [(stream(encode(tokenizer, char), 5 + i), stream.delta())[1] for i, char in enumerate("ab")] == ["", ""]
    assert stream.text == "xaabxab"
    assert stream.delta(finished=True) == "ab"


def test_nothing_is_held_back_if_nothing_would_be_cut() -> None:
    tokenizer = build("slow bytes")
    for stream in (TextStream(tokenizer), TextStream(tokenizer, stop=["ab"], include_stop_str_in_output=True)):
        assert [(stream(encode(tokenizer, char), i), stream.delta())[1] for i, char in enumerate("xa")] == ["x", "a"]


def test_the_stop_string_that_completes_first_wins() -> None:
    tokenizer = build("slow bytes")

    def ends(stop: list[str]) -> tuple[str, str | None]:
        stream = TextStream(tokenizer, stop=stop)
        run(stream, encode(tokenizer, "abcdef"))
        return stream.text, stream.stop_reason

    assert ends(["bcde", "cd"]) == ("ab", "cd")
    assert ends(["d", "bcd"]) == ("a", "bcd")  # the same token completes both
    assert ends(["x", "bc", "b"]) == ("a", "b")


def test_a_byte_token_completes_a_stop_string_at_once() -> None:
    tokenizer = build("byte-fallback")
    ids = [*encode(tokenizer, "hello"), byte_id(tokenizer, 0x0A), *encode(tokenizer, "hello")]
    kept, text, _ = run(stream := TextStream(tokenizer, stop=["\n"]), ids)
    assert (kept, text, stream.stop_reason) == (2, "hello", "\n")


def test_stop_strings_are_ignored_until_min_tokens_were_written() -> None:
    tokenizer = build("slow bytes")
    ids = encode(tokenizer, "ab.cd.ef")
    for min_tokens, text in ((0, "ab"), (2, "ab"), (3, "ab.cd"), (5, "ab.cd"), (6, "ab.cd.ef")):
        for cuts in ([], [2], [3], [4], list(range(1, 8))):
            assert run(TextStream(tokenizer, stop=["."], min_tokens=min_tokens), ids, cuts)[1] == text
    # Deltas do not wait for one that was ignored either.
    stream = TextStream(tokenizer, stop=[".", "xyz"], min_tokens=3)
    assert (stream(ids[:3], 0), stream.delta()) == (None, "ab.")
    # One that begins within min_tokens and completes after them counts.
    assert run(TextStream(tokenizer, stop=["b.c"], min_tokens=3), ids)[1] == "a"


def test_an_end_token_is_shown_only_without_skip_special_tokens() -> None:
    tokenizer = build("byte-level")
    ids = [*encode(tokenizer, "cat"), 0]
    assert run(TextStream(tokenizer, stop=["x"]), ids)[1] == "cat"
    assert run(TextStream(tokenizer, stop=["x"], skip_special_tokens=False), ids)[1] == "cat<eos>"
    stream = TextStream(tokenizer, stop=["<eos>"], skip_special_tokens=False)
    assert run(stream, ids)[:2] == (len(ids), "cat")


def test_a_stream_for_a_request_uses_its_parameters() -> None:
    tokenizer = build("byte-level")
    params = SamplingParams(
        stop="the", include_stop_str_in_output=True, min_tokens=1, max_tokens=50, skip_special_tokens=False
    )
    prompt, ids = encode(tokenizer, "x"), [0, *encode(tokenizer, "a cat, the dog")]
    assert run(TextStream.for_request(tokenizer, prompt, params), ids)[1] == "<eos>a cat, the"
