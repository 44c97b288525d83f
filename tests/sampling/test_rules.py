"""The rules about ids in a checkpoint's generation_config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from foredraft.sampling import CheckpointRules, Sampler, SamplingParams, not_honoured

CONFIG = {
    "eos_token_id": [2, 3],
    "bad_words_ids": [[2], [3], [7], [4, 5]],
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [1],
    "forced_eos_token_id": 2,
}


def sampler(rules: CheckpointRules, prompt: Sequence[int] = (9,), **params: Any) -> Sampler:
    resolved = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **params}).resolve({})
    return Sampler(resolved, prompt, torch.Generator(), rules=rules)


def masked(made: Sampler, history: list[int], drafted: list[int]) -> list[int]:
    logits = made.warp(torch.zeros(10), history, drafted)
    return [token for token, value in enumerate(logits.tolist()) if value == -torch.inf]


def test_rules_are_read_as_transformers_reads_them() -> None:
    rules = CheckpointRules.of(CONFIG)
    assert rules == CheckpointRules(((7,), (4, 5), (8,)), (1,), (2,))  # end ids are always allowed
    assert CheckpointRules.of({}) == CheckpointRules()
    assert rules.within(8) == CheckpointRules(((7,), (4, 5)), (1,), (2,))
    assert rules.within(2) == CheckpointRules((), (1,), ())


def test_each_rule_applies_at_its_position() -> None:
    made = sampler(CheckpointRules.of(CONFIG))
    assert made.has_logits_processors
    assert masked(made, [9], []) == [1, 7, 8]
    assert masked(made, [9], [6]) == [7, 8]
    assert masked(made, [9, 4], []) == [5, 7, 8]
    assert masked(made, [9, 6], [0]) == [7, 8]
    assert masked(made, [9, 6], [0, 0]) == [0, 1, 3, 4, 5, 6, 7, 8, 9]  # the fourth token of four
    assert masked(made.fresh([9]), [9], []) == [1, 7, 8]
    assert masked(sampler(CheckpointRules.of(CONFIG), max_tokens=None), [9, 6, 6, 6], []) == [7, 8]


@pytest.mark.parametrize("prompt", [[1, 4], [4, 5], [5, 5, 6], [6]])
def test_bad_words_that_begin_in_the_prompt_are_those_of_transformers(prompt: list[int]) -> None:
    words = [[7], [4, 5], [5, 6, 3], [4, 8, 0]]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=[2])
    made = sampler(CheckpointRules.of({"bad_words_ids": words, "eos_token_id": 2}), prompt)
    for output in ([], [8], [6], [6, 4], [4], [4, 8]):
        row = processor(torch.tensor([prompt + output]), torch.zeros(1, 10))[0]
        expected = [token for token, value in enumerate(row.tolist()) if value == -torch.inf]
        for split in range(len(output) + 1):
            assert masked(made, prompt + output[:split], output[split:]) == expected


def test_without_rules_nothing_changes() -> None:
    made = sampler(CheckpointRules())
    assert not made.has_logits_processors
    assert masked(made, [9], []) == []


def test_unsupported_settings_are_named() -> None:
    asked = {"num_beams": 4, "no_repeat_ngram_size": 3, "min_length": 0, "length_penalty": 2.0, "temperature": 0.7}
    assert not_honoured(asked) == ["num_beams=4", "no_repeat_ngram_size=3"]
    assert not_honoured({"num_beams": 1, "min_length": None}) == []
