"""Token-level intersection: it is lossless to draft from the shared tokens and name that distribution, but not to name another one."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foredraft.errors import VocabularyError
from foredraft.testing.toys import Prefix, Toy, dense_law, prefixes
from foredraft.vocabulary import ByteVocabulary, SharedIds, VocabularyPair, overlap_of
from tests.laws import BROKEN, EXACT, law_error, random_laws
from tests.vocabulary.vocabularies import pair

TARGET, DRAFT = ["a", "b", "c"], ["x", "c", "y", "a", "z"]
WAYS = [{}, {"temperature": 0.7}, {"top_k": 2}, {"temperature": 1.4, "top_p": 0.8}]


def words_vocabulary(words: list[str]) -> ByteVocabulary:
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    return ByteVocabulary(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)))


def words_pair(target: list[str], draft: list[str]) -> VocabularyPair:
    ours, theirs = words_vocabulary(target), words_vocabulary(draft)
    return VocabularyPair(ours, theirs, overlap_of(ours, theirs, "a"), "tli")


def draft_logits(prefix: Prefix) -> Tensor:
    """[1, 5], the logits of a draft model over its own ids."""
    return random_laws(4, 2, vocab_size=len(DRAFT))(prefix).log()[None]


def tli_toy(*, names_whole_vocabulary: bool = False, **params: float) -> Toy:
    """A target over `a`, `b` and `c`, and a draft model over five words, two of which are also the target's."""
    shared = SharedIds(words_pair(TARGET, DRAFT), len(DRAFT), len(TARGET))
    p = {x: random_laws(1, 2)(x).log() for x in prefixes(3, range(3))}
    q = {x: dense_law(shared.to_target(draft_logits(x))[0], **params) for x in prefixes(3, range(2))}
    named = None
    if names_whole_vocabulary:  # the draft's own probabilities, some of them of words that the target does not have
        named = {x: torch.zeros(3, dtype=torch.float64) for x in q}
        for x, row in named.items():
            row[shared.target_ids] = dense_law(draft_logits(x)[0], **params)[shared.draft_ids]
    laws = {x: dense_law(row, **params) for x, row in p.items()}
    return Toy(3, 2, p, laws, q, named=named, params=params)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("params", WAYS, ids=str)
def test_the_output_has_the_targets_distribution(rule: str, params: dict[str, float]) -> None:
    assert law_error(tli_toy(**params), rule) <= EXACT


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_naming_q_over_the_drafts_whole_vocabulary_is_detected(rule: str) -> None:
    assert law_error(tli_toy(names_whole_vocabulary=True), rule) > BROKEN


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_q_is_the_drafts_distribution_conditioned_on_shared_tokens(temperature: float) -> None:
    shared = SharedIds(words_pair(TARGET, DRAFT), len(DRAFT), len(TARGET))
    own = torch.softmax(draft_logits(())[0] / temperature, dim=0)[shared.draft_ids]
    expected = torch.zeros(3, dtype=torch.float64).index_put((shared.target_ids,), own / own.sum())
    torch.testing.assert_close(torch.softmax(shared.to_target(draft_logits(()))[0] / temperature, dim=0), expected)


def test_shared_tokens_have_the_same_bytes_or_role() -> None:
    both = pair("byte-level", "byte-fallback")
    shared = SharedIds(both, len(both.draft), len(both.target))
    for target, draft in zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True):
        assert shared.to_draft(target) == draft
        part = both.target.bytes_of[target]
        assert part == both.draft.bytes_of[draft]
        assert part is not None or both.special_to_target[draft] == target
    assert len(set(shared.target_ids.tolist())) == len(set(shared.draft_ids.tolist())) == len(shared.target_ids)
    eos = both.target.roles["eos_token_id"]
    assert shared.to_draft(eos) == both.draft.roles["eos_token_id"]


def test_ids_beyond_the_logits_are_not_shared() -> None:
    shared = SharedIds(words_pair(TARGET, DRAFT), draft_width=3, target_width=3)
    assert shared.target_ids.tolist() == [2]


def test_vocabularies_without_a_common_token_are_refused() -> None:
    with pytest.raises(VocabularyError, match="shares no token with the target's"):
        SharedIds(words_pair(TARGET, DRAFT), draft_width=1, target_width=3)
