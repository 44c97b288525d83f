"""Compare vocabularies, map their ids to bytes, and translate text from the ids of one to those of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.vocabulary.byte_vocabulary import ByteVocabulary
    from foredraft.vocabulary.comparison import check_vocabulary
    from foredraft.vocabulary.history import TranslatedHistory
    from foredraft.vocabulary.overlap import SAMPLE, Overlap, overlap_of
    from foredraft.vocabulary.pair import METHODS, VocabularyPair, pair_of
    from foredraft.vocabulary.shared_ids import SharedIds
    from foredraft.vocabulary.token_bytes import TokenBytes

__all__ = [
    "METHODS",
    "SAMPLE",
    "ByteVocabulary",
    "Overlap",
    "SharedIds",
    "TokenBytes",
    "TranslatedHistory",
    "VocabularyPair",
    "check_vocabulary",
    "overlap_of",
    "pair_of",
]

__getattr__ = attributes(
    __name__,
    {
        "byte_vocabulary": ("ByteVocabulary",),
        "comparison": ("check_vocabulary",),
        "history": ("TranslatedHistory",),
        "overlap": ("SAMPLE", "Overlap", "overlap_of"),
        "pair": ("METHODS", "VocabularyPair", "pair_of"),
        "shared_ids": ("SharedIds",),
        "token_bytes": ("TokenBytes",),
    },
)
