"""Held-out documents, as a target reads them."""

from __future__ import annotations

import pytest

from foredraft.train.corpus import Pair
from foredraft.train.held_out import beginning


@pytest.mark.parametrize(
    ("document", "expected"), [("one two three", "one two"), (" " * 100 + "one two three", "one two"), ("one", "one")]
)
def test_a_text_begins_with_its_first_word(document: str, expected: str) -> None:
    assert beginning(document, 8) == expected


def test_a_pair_begins_with_its_source() -> None:
    assert beginning(Pair("a source", "a text"), 3) == "a source"
