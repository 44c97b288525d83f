"""A target's vocabulary and a draft model's different one, and how the draft model is used with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from foredraft.errors import VocabularyError
from foredraft.vocabulary.byte_vocabulary import ByteVocabulary, byte_vocabulary_of
from foredraft.vocabulary.comparison import check_vocabulary
from foredraft.vocabulary.overlap import SAMPLE, Overlap, overlap_of

AUTO, NONE, SLEM, TLI = "auto", "none", "slem", "tli"

METHODS: Mapping[str, str] = MappingProxyType(
    {
        SLEM: "the draft's text is encoded again with the target's tokenizer, and compared",
        TLI: "the draft model draws from the tokens that both have",
    }
)
"""How drafts with another vocabulary are verified (arXiv:2502.05202)."""


@dataclass(frozen=True)
class VocabularyPair:
    """target, draft: the vocabularies. overlap: measured on a text. method: one of METHODS."""

    target: ByteVocabulary
    draft: ByteVocabulary
    overlap: Overlap
    method: str

    @cached_property
    def special_to_target(self) -> dict[int, int]:
        """The target's counterparts of the draft's special tokens: those with the same role, or else the same text."""
        by_text = {text: index for index, text in self.target.special.items()}
        same = {index: by_text[text] for index, text in self.draft.special.items() if text in by_text}
        roles = self.draft.roles.items()
        return same | {index: self.target.roles[role] for role, index in roles if role in self.target.roles}

    @cached_property
    def special_to_draft(self) -> dict[int, int]:
        """The same in the other direction."""
        by_text = {text: index for index, text in self.draft.special.items()}
        same = {index: by_text[text] for index, text in self.target.special.items() if text in by_text}
        roles = self.target.roles.items()
        return same | {index: self.draft.roles[role] for role, index in roles if role in self.draft.roles}

    def __str__(self) -> str:
        """One line: the chosen method, and the numbers that it was chosen by."""
        return f"its vocabulary differs from the target's: {self.method}, {METHODS[self.method]} ({self.overlap})"


def pair_of(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, method: str = AUTO, text: str = SAMPLE
) -> VocabularyPair | None:
    """None if both have the same vocabulary. method: one of METHODS, or "auto" to choose by the overlap of the two on the text.

    Raises VocabularyError if they differ and the method is "none", or the tokens of one do not stand for bytes.
    """
    try:
        check_vocabulary(target, draft)
    except VocabularyError as difference:
        if method == NONE:
            raise
        ours, theirs = _read("target's", target, difference), _read("draft model's", draft, difference)
        overlap = overlap_of(ours, theirs, text)
        chosen = TLI if overlap.is_alike else SLEM
        return VocabularyPair(ours, theirs, overlap, chosen if method == AUTO else method)
    return None


def _read(whose: str, tokenizer: PreTrainedTokenizerBase, difference: VocabularyError) -> ByteVocabulary:
    try:
        return byte_vocabulary_of(tokenizer)
    except VocabularyError as error:
        raise VocabularyError(f"{difference}; the {whose} tokens cannot be read as bytes: {error}") from None
