"""Text out of tokens: nothing lost, nothing broken, nothing unsaid; and stop strings, wherever they fall."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_python import PythonBackend

from foredraft.errors import ForedraftError
from foredraft.sampling.params import SamplingParams
from foredraft.text.text import IncrementalDecoder, TextStream, bad_words_ids, encode_prompt, render_chat

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
BAD = "\ufffd"
CORPUS = [
    "Once upon a time there was a cat, and it didn't like the rain.\n\n    def f(x):\n        return x + 1\n",
    "日本語のテキスト、中文文本。한국어 😀👩‍👩‍👧 naïve café — “quoted” 🎉🎉",
] * 5


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _fast(**kwargs: Any) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(**kwargs)


def _byte_level() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = _fast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_tokens(["<tool>"])  # added, but not special
    return fast


def _byte_fallback() -> PreTrainedTokenizerBase:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *"▁abcdehlort.!'語"]
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *[a + b for a, b in merges]])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return _fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _metaspace() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _fast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def _word_piece(clean_up: bool) -> PreTrainedTokenizerBase:
    words = "[UNK] [CLS] [SEP] the cat do don ##s ##ing ##n ' ' t m ve re s n n't . , ? ! ## 語 ##語 ##."
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words.split()))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=clean_up)
    kwargs: dict[str, Any] = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return _fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=clean_up, **kwargs)


def _characters() -> PreTrainedTokenizerBase:
    """Single characters, spaces among them, and clean-up over the whole text: what was a space may go again."""
    vocab = {char: i for i, char in enumerate(["<unk>", *"abn'tmsver. ,?!"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True)


class _Stripped(PythonBackend):
    """A tokenizer in Python whose decoder strips white space at both ends, as the simplest SentencePiece ones do."""

    def __init__(self, **kwargs: Any) -> None:
        self._pieces = ["<unk>", "</s>", "▁", "▁a", "b", "▁▁"]
        super().__init__(unk_token="<unk>", eos_token="</s>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self._pieces)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text.replace(" ", "▁"))

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


def _shared(name: str) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(MODELS / name))


BUILD: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": _byte_level,
    "byte-fallback": _byte_fallback,
    "metaspace": _metaspace,
    "word-piece": lambda: _word_piece(False),
    "word-piece, cleaned": lambda: _word_piece(True),
    "characters, cleaned": _characters,
    "slow bytes": ByT5Tokenizer,
    "slow, stripped": _Stripped,
    "target": lambda: _shared("target"),
    "stories260K": lambda: _shared("stories260K"),
    "babyllama105": lambda: _shared("babyllama105"),
}
IN_SHARED = ("target", "stories260K", "babyllama105")
READ_BYTES = ("byte-level", "byte-fallback", "slow bytes", "target", "stories260K")  # can write any text


@cache
def build(name: str) -> PreTrainedTokenizerBase:
    return BUILD[name]()


@pytest.fixture(scope="session")
def shared() -> Path:
    if not MODELS.is_dir():
        pytest.skip(f"the shared models are not at {MODELS}")
    return MODELS


@pytest.fixture(params=list(BUILD), scope="session")
def name(request: pytest.FixtureRequest) -> str:
    if request.param in IN_SHARED:
        request.getfixturevalue("shared")
    return str(request.param)


@pytest.fixture(params=READ_BYTES, scope="session")
def byte_name(request: pytest.FixtureRequest) -> str:
    if request.param in IN_SHARED:
        request.getfixturevalue("shared")
    return str(request.param)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"]))


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool) -> str:
    return cast(str, tokenizer.decode(list(ids), skip_special_tokens=skip))


def num_shared(a: str, b: str) -> int:
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


def law(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int], skip: bool) -> str:
    """What the pieces must add up to."""
    before, after = decode(tokenizer, prompt, skip), decode(tokenizer, prompt + output, skip)
    return after[num_shared(before, after) :]


def pieces(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int], skip: bool) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip, prompt_ids=prompt)
    return [*[decoder.push(i) for i in output], decoder.flush()]


def ids_of(name: str, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    """Any ids at all, or a few over and over: garbage, loops, runs of bytes."""
    one = st.integers(0, len(build(name)) - 1)
    few = st.lists(one, min_size=1, max_size=4).flatmap(lambda some: st.lists(st.sampled_from(some), max_size=max_size))
    return st.one_of(st.lists(one, max_size=max_size), few)


TEXTS = st.one_of(
    st.text(st.sampled_from("abc \n.,'語é😀👩‍👧hello日本"), max_size=40),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=15),
)


# ---- the decoder


@examples(80)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_what_decoding_all_gives(name: str, data: st.DataObject, skip: bool) -> None:
    prompt, output = data.draw(ids_of(name, 30)), data.draw(ids_of(name))
    assert "".join(pieces(build(name), prompt, output, skip)) == law(build(name), prompt, output, skip)


@examples(200)
@given(st.lists(st.sampled_from([*"ab .'", " n't", " 'm", " 've", " 're", " ' ", " 's"]), max_size=12).map("".join))
def test_nothing_is_released_that_clean_up_takes_back(text: str) -> None:
    tokenizer = build("characters, cleaned")
    output = encode(tokenizer, text)
    assert "".join(pieces(tokenizer, [], output, True)) == law(tokenizer, [], output, True)


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
    assert text + decoder.flush() == law(build(name), prompt, output, skip)


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
    ids = [token_id for byte in "éa".encode() for token_id in _byte_id(tokenizer, byte)]
    assert "".join(pieces(tokenizer, ids[:1], ids[1:], True)) == "éa"


def _byte_id(tokenizer: PreTrainedTokenizerBase, byte: int) -> list[int]:
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(bytes([byte]).decode("latin-1"))
    char = shown[0][0][-1] if byte >= 0x80 else chr(byte)
    table = {bytes([b]): c for b, c in _byte_table()}
    return [cast(int, tokenizer.convert_tokens_to_ids(table.get(bytes([byte]), char)))]


def _byte_table() -> Iterator[tuple[int, str]]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the rest follow from 256 on."""
    extra = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield byte, chr(byte)
        else:
            yield byte, chr(extra)
            extra += 1


@pytest.mark.parametrize("which", ["byte-level", "byte-fallback"])
def test_what_stays_incomplete_appears_at_the_end(which: str) -> None:
    tokenizer = build(which)
    start = encode(tokenizer, "a") + (
        _byte_id(tokenizer, 0xC3) if which == "byte-level" else [cast(int, tokenizer.convert_tokens_to_ids("<0xC3>"))]
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
        return  # decodes any id to something
    output = encode(tokenizer, "cat")
    padded = [output[0], len(tokenizer) + 7, *output[1:], 2**31]
    assert "".join(pieces(tokenizer, [], padded, True)) == decode(tokenizer, output, True)


@pytest.mark.parametrize("which", ["byte-level", "byte-fallback", "metaspace", "characters, cleaned", "slow bytes"])
@pytest.mark.parametrize("kind", ["bad bytes", "good bytes", "one token", "special", "special and text"])
def test_cost_per_token_is_bounded_whatever_is_written(which: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build(which)
    one = {
        "bad bytes": [_any_id(tokenizer, byte) for byte in (0xFF, 0x80, 0xF0, 0x9F)],
        "good bytes": [_any_id(tokenizer, byte) for byte in "日".encode()],
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
    # ByT5 drops bad bytes in silence, so there the window may grow to its bound; everywhere else it stays short.
    assert num_decoded / len(output) < (300 if which == "slow bytes" else 60)


def _any_id(tokenizer: PreTrainedTokenizerBase, byte: int) -> int:
    if isinstance(tokenizer, ByT5Tokenizer):
        return byte + 3
    token = f"<0x{byte:02X}>"
    found = cast("int | None", tokenizer.convert_tokens_to_ids(token))
    if found is not None and tokenizer.convert_ids_to_tokens(found) == token:
        return found
    found = cast("int | None", tokenizer.convert_tokens_to_ids(dict(_byte_table())[byte]))
    return 4 if found is None else found


def test_a_long_run_of_byte_tokens_streams_before_it_ends() -> None:
    tokenizer = build("byte-fallback")
    text = "日本" * 60
    output = encode(tokenizer, text)
    released = pieces(tokenizer, [], output, True)
    assert len("".join(released[:-100])) > 60
    assert "".join(released).strip() == text
    # Where such a run breaks late, what was given out stays.
    broken = "".join(pieces(tokenizer, [], [*output, _any_id(tokenizer, 0xFF), *encode(tokenizer, "a")], True))
    assert broken.lstrip() == text + BAD + " a"
    # And it may be the end of a prompt.
    for cut in (1, 2, 3):
        assert "".join(pieces(tokenizer, output[:-cut], output[-cut:], True)) == "本"


def test_a_byte_token_in_a_prompt_is_not_output() -> None:
    tokenizer = build("byte-fallback")
    newline = _any_id(tokenizer, 0x0A)
    prompt = [*encode(tokenizer, "hello"), newline]
    assert pieces(tokenizer, prompt, encode(tokenizer, "hello"), True)[0] == " hello"
    assert "".join(pieces(tokenizer, prompt, [newline, newline], True)) == "\n\n"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(skip: bool) -> None:
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


# ---- the stop rule


def run(
    stream: TextStream, ids: Sequence[int], cuts: Sequence[int] = (), *, ended: bool = True
) -> tuple[int, str, list[str]]:
    """Feeds ids in blocks as an engine would; how many were kept, the text, and what was streamed."""
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
    """The stop rule by brute force: after each token look at the whole text for what was not there before."""
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
    return len(ids), law(tokenizer, [], ids, skip), None


def cuts_of(length: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(1, max(1, length - 1)), max_size=8).map(lambda s: sorted(c for c in s if c < length))


@examples(60)
@given(data=st.data(), include=st.booleans(), skip=st.booleans(), min_tokens=st.integers(0, 6))
def test_the_stop_rule_is_the_one_by_brute_force_however_the_ids_arrive(
    name: str, data: st.DataObject, include: bool, skip: bool, min_tokens: int
) -> None:
    tokenizer = build(name)
    ids = data.draw(st.one_of(ids_of(name, 25), TEXTS.map(lambda text: encode(tokenizer, text))))
    text = law(tokenizer, [], ids, skip)
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
def test_a_stop_string_is_found_wherever_it_is(
    byte_name: str, data: st.DataObject, before: str, stop: str, after: str
) -> None:
    tokenizer = build(byte_name)
    ids = encode(tokenizer, before + stop + after)
    text = law(tokenizer, [], ids, False)
    assume(stop in text and BAD not in text)
    stream = TextStream(tokenizer, stop=[stop], skip_special_tokens=False)
    kept, final, streamed = run(stream, ids, data.draw(cuts_of(len(ids))))
    assert final == text[: text.index(stop)] == "".join(streamed)
    assert stream.stop_reason == stop
    assert stop in law(tokenizer, [], ids[:kept], False)
    assert stop not in law(tokenizer, [], ids[: kept - 1], False)


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


def test_what_may_become_a_stop_string_is_held_back() -> None:
    tokenizer = build("slow bytes")
    stream = TextStream(tokenizer, stop=["abc", "bd"])
    deltas = [(stream(encode(tokenizer, char), i), stream.delta())[1] for i, char in enumerate("xaabx")]
    assert deltas == ["x", "", "a", "", "abx"]
    assert [(stream(encode(tokenizer, char), 5 + i), stream.delta())[1] for i, char in enumerate("ab")] == ["", ""]
    assert stream.text == "xaabxab"
    assert stream.delta(finished=True) == "ab"


def test_nothing_is_held_back_where_nothing_will_be_cut() -> None:
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
    ids = [*encode(tokenizer, "hello"), _any_id(tokenizer, 0x0A), *encode(tokenizer, "hello")]
    kept, text, _ = run(stream := TextStream(tokenizer, stop=["\n"]), ids)
    assert (kept, text, stream.stop_reason) == (2, "hello", "\n")


def test_stop_strings_are_ignored_until_min_tokens_were_written() -> None:
    tokenizer = build("slow bytes")
    ids = encode(tokenizer, "ab.cd.ef")
    for min_tokens, text in ((0, "ab"), (2, "ab"), (3, "ab.cd"), (5, "ab.cd"), (6, "ab.cd.ef")):
        for cuts in ([], [2], [3], [4], list(range(1, 8))):
            assert run(TextStream(tokenizer, stop=["."], min_tokens=min_tokens), ids, cuts)[1] == text
    # Nor does delta wait for one that was ignored.
    stream = TextStream(tokenizer, stop=[".", "xyz"], min_tokens=3)
    assert (stream(ids[:3], 0), stream.delta()) == (None, "ab.")
    # One that begins among the first and completes after them counts.
    assert run(TextStream(tokenizer, stop=["b.c"], min_tokens=3), ids)[1] == "a"


def test_an_end_of_text_token_shows_only_where_special_tokens_are_not_skipped() -> None:
    tokenizer = build("byte-level")
    ids = [*encode(tokenizer, "cat"), 0]
    assert run(TextStream(tokenizer, stop=["x"]), ids)[1] == "cat"
    assert run(TextStream(tokenizer, stop=["x"], skip_special_tokens=False), ids)[1] == "cat<eos>"
    stream = TextStream(tokenizer, stop=["<eos>"], skip_special_tokens=False)
    assert run(stream, ids)[:2] == (len(ids), "cat")


def test_a_stream_for_a_request_takes_its_parameters() -> None:
    tokenizer = build("byte-level")
    params = SamplingParams(
        stop="the", include_stop_str_in_output=True, min_tokens=1, max_tokens=50, skip_special_tokens=False
    )
    prompt, ids = encode(tokenizer, "x"), [0, *encode(tokenizer, "a cat, the dog")]
    assert run(TextStream.for_request(tokenizer, prompt, params), ids)[1] == "<eos>a cat, the"


# ---- prompts, chats, bad words


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


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[ai]{% endif %}"
)


def test_a_chat_has_the_special_tokens_of_its_template_alone(shared: Path) -> None:
    tokenizer = build("target")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert render_chat(tokenizer, chat, chat_template=TEMPLATE) == [0, *encode(tokenizer, "[user]hi[assistant]yes[ai]")]
    assert (
        render_chat(tokenizer, chat, chat_template=TEMPLATE, add_generation_prompt=False)[-1]
        != encode(tokenizer, "]")[-1]
    )
    assert decode(tokenizer, render_chat(tokenizer, chat, chat_template="{{ style }}", style="cat"), False) == "cat"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "list of dicts"),
        ({"role": "user", "content": "hi"}, "list of dicts"),
        (["hi"], "message 0 must be a dict"),
        ([{"role": "user", "content": "a"}, {"content": "hi"}], "message 1 must be a dict"),
        ([{"role": "user"}], "content of message 0"),
        ([{"role": "user", "content": ["hi"]}], "must be a string, not list"),
        ([{"role": "user", "content": "\udfff"}], "surrogate"),
    ],
)
def test_malformed_chats_are_refused_in_one_line(messages: Any, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        render_chat(build("byte-level"), messages, chat_template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert "\n" not in str(caught.value)


def test_a_call_of_a_tool_needs_no_content() -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render_chat(build("byte-level"), chat, chat_template="{{ messages[0].role }}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template: pass chat_template="),
        ("{% if %}", "chat template fails"),
        ("{{ raise_exception('roles must\n\nalternate') }}", "fails on these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template fails"),
        ("{{ '' }}", "prompt is empty"),
    ],
)
def test_templates_that_fail_are_reported_in_one_line(template: str | None, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        render_chat(build("byte-level"), [{"role": "user", "content": "hi"}], chat_template=template)
    assert "\n" not in str(caught.value)


def test_bad_words_are_masked_with_and_without_a_space() -> None:
    tokenizer = build("byte-level")
    expect = [tuple(encode(tokenizer, text)) for text in ("cat", " cat", " rain")]
    assert bad_words_ids(tokenizer, ["cat", " cat", " rain", "cat"]) == expect
    assert bad_words_ids(tokenizer, []) == []


def test_a_text_the_tokenizer_cannot_encode_is_refused() -> None:
    tokenizer = Tokenizer(models.Unigram([("a", -1.0)], unk_id=None))
    with pytest.raises(ForedraftError, match="the tokenizer cannot encode this text: Encountered"):
        encode_prompt(_fast(tokenizer_object=tokenizer), "b")


def test_a_bad_word_without_tokens_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"cat": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<eos>")])
    with pytest.raises(ForedraftError, match="bad_words entry ' ' has no tokens"):
        bad_words_ids(_fast(tokenizer_object=tokenizer), ["cat", " "])
