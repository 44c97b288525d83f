"""Compares two models' vocabularies, from their tokenizers alone."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.errors import VocabularyError
from foredraft.sampling import AUTO
from foredraft.tools.inspection.report import VocabularyReport
from foredraft.vocabulary import SAMPLE, ByteVocabulary, Overlap, overlap_of, pair_of


def compare_vocabularies(
    tokenizers: Sequence[PreTrainedTokenizerBase | None], method: str, text: str | None
) -> tuple[str | None, VocabularyReport | None]:
    """-> why they cannot be used together (None: they can), and the comparison (None if they cannot, or without two tokenizers)

    tokenizers: the target's, and the draft model's if there is one. method: see LLM(heterogeneous_vocab=). text: None takes the
    built-in one.
    """
    if len(tokenizers) < 2:
        return None, None
    target, draft = tokenizers
    if target is None or draft is None:
        return None, None
    try:
        pair = pair_of(target, draft, method, text or SAMPLE)
    except VocabularyError as error:
        return str(error), None
    overlap = _own_overlap(target, text or SAMPLE) if pair is None else pair.overlap
    return None, VocabularyReport(
        method="same" if pair is None else pair.method,
        agreement=None if overlap is None else overlap.agreement,
        target_bytes_per_id=None if overlap is None else overlap.target_bytes_per_id,
        draft_bytes_per_id=None if overlap is None else overlap.draft_bytes_per_id,
        text="built-in" if text is None else "given",
        is_chosen=method == AUTO,
    )


def _own_overlap(tokenizer: PreTrainedTokenizerBase, text: str) -> Overlap | None:
    """The overlap of a vocabulary with itself; None if its tokens cannot be read as bytes."""
    try:
        vocabulary = ByteVocabulary(tokenizer)
    except VocabularyError:
        return None
    return overlap_of(vocabulary, vocabulary, text)
