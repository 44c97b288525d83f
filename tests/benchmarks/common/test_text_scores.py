"""BLEU and ROUGE-L of texts with known scores."""

from __future__ import annotations

import pytest

from benchmarks.common.text_scores import bleu, longest_common_subsequence, rouge_l


def test_the_references_themselves_have_the_maximum_score() -> None:
    texts = ["Der Hund schläft auf dem Sofa.", "Ich habe keine Zeit."]
    assert bleu(texts, texts) == pytest.approx(100)
    assert rouge_l(texts, texts) == pytest.approx(100)


def test_rouge_is_the_f1_of_the_longest_common_subsequence() -> None:
    assert longest_common_subsequence(["a", "b", "c", "d"], ["b", "d", "a", "c"]) == 2
    assert rouge_l(["the cat sat"], ["the big cat"]) == pytest.approx(100 * 2 / 3)
    assert rouge_l(["x"], ["y z"]) == 0
