"""How the method for two vocabularies is chosen, and the numbers that decide it."""

from __future__ import annotations

import pytest

from foredraft.errors import VocabularyError
from foredraft.model import EMBEDDED, LoadOptions, load_tokenizer
from foredraft.vocabulary import Overlap, overlap_of, pair_of
from tests.text.toy_tokenizers import MODELS, build
from tests.vocabulary.permuted import permuted_draft
from tests.vocabulary.vocabularies import vocabulary


@pytest.mark.parametrize(
    ("overlap", "is_alike"),
    [
        (Overlap(0.95, 4.0, 4.0), True),
        (Overlap(0.95, 4.3, 4.0), True),
        (Overlap(0.94, 4.0, 4.0), False),
        (Overlap(1.0, 4.5, 4.0), False),
        (Overlap(1.0, 3.5, 4.0), False),
    ],
)
def test_tli_is_chosen_if_ids_agree_and_have_equal_lengths(overlap: Overlap, is_alike: bool) -> None:
    assert overlap.is_alike is is_alike


def test_a_vocabulary_fully_agrees_with_itself() -> None:
    own = vocabulary("byte-level")
    overlap = overlap_of(own, own)
    assert (overlap.agreement, overlap.length_ratio) == (1.0, 1.0)


def test_agreement_is_counted_by_position() -> None:
    bytewise, pieces = vocabulary("byte-level"), vocabulary("byte-fallback")
    text = "hell"  # one id in one vocabulary, several in the other
    assert len(pieces.encode(text)) == 1
    found = overlap_of(bytewise, pieces, text)
    assert found.draft_bytes_per_id == 4
    assert found.agreement == (1.0 if len(bytewise.encode(text)) == 1 else 0.0)


def test_tli_is_chosen_for_the_same_tokens_with_other_ids() -> None:
    target, draft = (load_tokenizer(folder, LoadOptions()) for folder in (EMBEDDED / "target", permuted_draft()))
    found = pair_of(target, draft)
    assert found is not None
    assert found.method == "tli"
    assert found.overlap == Overlap(1.0, found.overlap.draft_bytes_per_id, found.overlap.draft_bytes_per_id)
    assert "100 % of the draft's ids agree in place" in str(found)
    assert "\n" not in str(found)


def test_the_user_may_choose_another_method() -> None:
    target, draft = (load_tokenizer(folder, LoadOptions()) for folder in (EMBEDDED / "target", permuted_draft()))
    forced = pair_of(target, draft, "slem")
    assert forced is not None
    assert forced.method == "slem"
    with pytest.raises(VocabularyError, match="use a draft with the target's tokenizer"):
        pair_of(target, draft, "none")
    assert pair_of(target, target, "slem") is None


def test_slem_is_chosen_for_other_tokens() -> None:
    found = pair_of(build("byte-level"), build("byte-fallback"))
    assert found is not None
    assert found.method == "slem"


def test_a_tokenizer_that_cannot_be_read_is_named_with_the_difference() -> None:
    with pytest.raises(
        VocabularyError, match=r"differs from the target's: .*the draft model's tokens cannot be read as bytes"
    ):
        pair_of(build("byte-level"), build("word-piece"))


def test_slem_is_chosen_for_the_shared_models() -> None:
    if not MODELS.is_dir():
        pytest.skip("needs ../shared/models")
    found = pair_of(build("target"), build("stories260K"))
    assert found is not None
    assert found.method == "slem"
    assert found.overlap.agreement < 0.5
    assert found.overlap.length_ratio > 1.5
