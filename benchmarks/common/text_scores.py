"""How close texts are to references: BLEU (sacrebleu) and ROUGE-L."""

from __future__ import annotations

from collections.abc import Sequence

from sacrebleu.metrics.bleu import BLEU


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU, 0 to 100, with one reference per text and sacrebleu's defaults (13a, mixed case, exp)."""
    return float(BLEU().corpus_score(list(texts), [list(references)]).score)


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float:
    """Mean F1 of the longest common subsequence of lower-case words, 0 to 100 (Lin, 2004)."""
    scores = [_rouge_l(text.lower().split(), ref.lower().split()) for text, ref in zip(texts, references, strict=True)]
    return 100 * sum(scores) / len(scores)


def _rouge_l(text: Sequence[str], reference: Sequence[str]) -> float:
    common = longest_common_subsequence(text, reference)
    return 2 * common / (len(text) + len(reference)) if common else 0.0


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = 0
        for place, other in enumerate(second, start=1):
            before, row[place] = row[place], before + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]
