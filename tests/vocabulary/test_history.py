"""A history in a draft model's ids: it is updated as if it had been encoded whole, and drafts after it are translated to the same text
or not at all."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.vocabulary import ByteVocabulary, TranslatedHistory
from foredraft.vocabulary.overlap import SAMPLE
from tests.text.toy_tokenizers import MODELS, TEXTS, build, encode, examples
from tests.vocabulary.vocabularies import OWN, SHARED, pair, text_violation, vocabulary

PAIRS = [(a, b) for a in OWN for b in OWN if a != b]
SHARED_PAIRS = [(a, b) for a in SHARED for b in SHARED if a != b]
RANDOM_TEXTS = 1000


def random_text(random: Random) -> str:
    """Random text of all scripts, with a larger share of ASCII and white space."""

    def char() -> str:
        kind = random.random()
        if kind < 0.4:
            return random.choice("abc de\n\t .,'\"(){}09")
        while 0xD800 <= (code := random.randrange(1, 0x110000 if kind < 0.6 else 0x3000)) < 0xE000:
            pass
        return chr(code)

    return "".join(char() for _ in range(random.randint(0, 24)))


def draft_behind(both: Any, history: TranslatedHistory, text: str) -> list[int]:
    """The ids that a draft model writes to continue with this text."""
    ids: list[int] = both.draft.spell(history.pending + text.encode())[0]
    return ids


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_random_texts_are_translated_unchanged_or_not_at_all(target: str, draft: str) -> None:
    both, random, violations, num_proposed = pair(target, draft), Random(7), [], 0
    for _ in range(RANDOM_TEXTS):
        before, behind = random_text(random), random_text(random)
        history = TranslatedHistory(both)
        history.follow(both.target.spell(before.encode())[0])
        drafted = draft_behind(both, history, behind)
        proposed = history.to_target(drafted)
        num_proposed += bool(proposed)
        violations += [found] if (found := text_violation(history, drafted, before.encode(), proposed)) else []
    assert violations == []
    assert num_proposed > 0


class _CleanedUp(ByteVocabulary):
    """A seeded bug: encodes the cleaned-up text that a tokenizer would show."""

    def write(self, data: bytes) -> list[int]:
        return super().write(data.decode(errors="ignore").strip().replace(" .", ".").encode())


def test_altering_text_by_clean_up_is_detected() -> None:
    both = pair("byte-level", "byte-fallback")
    broken = TranslatedHistory(type(both)(_CleanedUp(build("byte-level")), both.draft, both.overlap, both.method))
    tokens = both.target.spell(b"a cat")[0]
    broken.follow(tokens)
    drafted = draft_behind(both, broken, " . and")
    assert text_violation(broken, drafted, b"a cat", broken.to_target(drafted)) is not None


@pytest.mark.parametrize(("target", "draft"), [*PAIRS, *SHARED_PAIRS])
def test_a_growing_history_equals_the_encoding_of_the_whole_text(target: str, draft: str) -> None:
    if target in SHARED and not MODELS.is_dir():
        pytest.skip("needs ../shared/models")
    both = pair(target, draft)
    tokens, grown, history = both.target.spell(SAMPLE.encode())[0], list[int](), TranslatedHistory(both)
    for token in tokens:
        grown.append(token)
        ids = history.follow(grown)
    assert ids == TranslatedHistory(both).follow(tokens)


def test_the_draft_reads_a_text_as_its_own_tokenizer_would() -> None:
    for target, draft in PAIRS:
        both, text = pair(target, draft), "a hello cat or bad.\n"
        tokens = encode(build(target), text)
        if both.target.joined(tokens).removeprefix(both.target.prefix_space) != text.encode():
            continue  # this target cannot encode it
        assert TranslatedHistory(both).follow(tokens) == encode(build(draft), text), (target, draft)


@given(st.lists(st.tuples(st.integers(0, 30), TEXTS), max_size=6), st.sampled_from(PAIRS))
@examples(60)
def test_a_cut_or_replaced_history_leaves_nothing_behind(steps: list[tuple[int, str]], names: tuple[str, str]) -> None:
    both = pair(*names)
    history, tokens = TranslatedHistory(both), list[int]()
    for num_kept, text in steps:
        tokens = [*tokens[:num_kept], *both.target.spell(text.encode())[0]]
        history.follow(tokens)
        drafted = draft_behind(both, history, text)
        assert text_violation(history, drafted, b"", history.to_target(drafted)) is None
    fresh = TranslatedHistory(both)
    fresh.follow(tokens)
    assert (both.draft.joined(history.ids), history.pending) == (both.draft.joined(fresh.ids), fresh.pending)


def test_returned_ids_do_not_change() -> None:
    both = pair("byte-level", "byte-fallback")
    history, tokens = TranslatedHistory(both), both.target.encode("a cat, hel")
    ids = history.follow(tokens)
    before = list(ids)
    history.follow([*tokens, *both.target.encode("lo there")])
    assert ids == before


def test_the_draft_completes_an_incomplete_character() -> None:
    both = pair("byte-level", "byte-fallback")
    whole, history = "a 😀".encode(), TranslatedHistory(both)
    singles = [both.target.single_byte_ids[byte] for byte in whole]
    history.follow(singles[:-2])
    assert history.pending == whole[2:4]
    going_on = [both.draft.single_byte_ids[byte] for byte in [*whole[2:], *b"!"]]
    assert both.target.joined(history.to_target(going_on)) == whole[4:] + b"!"
    assert history.to_target(both.draft.encode("é")) == []


def test_special_tokens_are_translated_by_role_and_split_the_text() -> None:
    both = pair("byte-level", "byte-fallback")
    eos, its_eos = vocabulary("byte-level").roles["eos_token_id"], vocabulary("byte-fallback").roles["eos_token_id"]
    history = TranslatedHistory(both)
    ids = history.follow([*both.target.encode("hel"), eos, *both.target.encode("lo")])
    assert ids[ids.index(its_eos) + 1 :] == both.draft.encode("lo")
    drafted = [*both.draft.encode(" a"), its_eos, *both.draft.encode(" b")]
    assert history.to_target(drafted) == [*both.target.encode(" a"), eos]


def test_a_history_in_an_unusual_tokenization_can_be_continued() -> None:
    both = pair("target", "stories260K") if MODELS.is_dir() else pair("byte-level", "byte-fallback")
    singles = [both.target.single_byte_ids[byte] for byte in b"once"]
    history = TranslatedHistory(both)
    history.follow(singles)
    assert both.target.joined(history.to_target(both.draft.encode(" upon a time"))) == b" upon a time"
