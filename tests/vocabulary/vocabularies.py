"""Vocabularies of every kind, and a check that text is translated between them unchanged or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from foredraft.vocabulary import ByteVocabulary, TranslatedHistory, VocabularyPair, overlap_of
from tests.text.toy_tokenizers import build

OWN = ("byte-level", "byte-fallback", "metaspace", "characters, cleaned")
SHARED = ("target", "stories260K", "babyllama105")


@cache
def vocabulary(name: str) -> ByteVocabulary:
    return ByteVocabulary(build(name))


@cache
def pair(target: str, draft: str, method: str = "slem") -> VocabularyPair:
    ours, theirs = vocabulary(target), vocabulary(draft)
    return VocabularyPair(ours, theirs, overlap_of(ours, theirs), method)


def text_violation(
    history: TranslatedHistory, drafted: Sequence[int], text: bytes, proposed: Sequence[int]
) -> str | None:
    """What is wrong with a proposal that `to_target` made of a draft after a text, or None. The bytes of a proposal must be those that the
    draft wrote after the text, or a beginning of them."""
    both = history.pair
    written = both.draft.joined(drafted)
    found = both.target.joined(proposed)
    if found and not written.startswith(history.pending):
        return f"behind {text!r}: {found!r}, though {history.pending!r} does not go on with {written!r}"
    return (
        None
        if written.startswith(history.pending + found) or not found
        else f"behind {text!r}: {found!r} of {written!r}"
    )
