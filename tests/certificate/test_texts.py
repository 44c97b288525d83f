"""The drafts of a trial's texts: which drafter makes them, and how they are corrupted and recorded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from foredraft.certificate.texts import InTurn, Record, RecordedDrafter
from foredraft.drafters import ScriptedDrafter
from foredraft.engine.drafter_group import DrafterGroup
from foredraft.engine.proposal import DraftRequest
from foredraft.engine.sequence import TokenSequence
from foredraft.policy import DraftBudget
from foredraft.sampling import Sampler, SamplingParams


def sampler(**params: Any) -> Sampler:
    return Sampler(SamplingParams(**params).resolve({}), [1], torch.Generator())


def sequence(seq_id: int, length: int) -> TokenSequence:
    return TokenSequence(seq_id, [1] * length, sampler(), max_len=100, speculative_tokens=4)


def proposed(seq_id: int, text: list[int], num_read: int, script: list[int] | None = None) -> tuple[list[int], Record]:
    """(the draft after the first num_read tokens of a text, by a drafter that knows it; the record)"""
    record = Record()
    drafter = RecordedDrafter(
        ScriptedDrafter(lambda request: text[len(request.tokens) :]),
        record,
        {} if script is None else {seq_id: script},
        wrong_every=3,
    )
    request = DraftRequest(seq_id, text[:num_read], 4, sampler(temperature=1.0))
    return drafter.propose([request]).draft_ids[0], record


def test_two_drafters_take_turns_within_a_text_and_from_pair_to_pair() -> None:
    policy = InTurn(["a", "b"])
    policy.begin([])
    names = [
        policy.draft_budget(sequence(seq_id, length)).drafter for seq_id, length in ((0, 7), (1, 7), (0, 8), (2, 7))
    ]
    assert names == ["a", "a", "b", "b"]


def test_a_drafter_that_cools_down_is_counted_once_and_does_not_affect_other_turns() -> None:
    policy = InTurn(["a", "b"])
    policy.begin([])
    assert policy.cool_down(["a"], "failed", 3) == ["a"]
    assert policy.fallbacks == Counter({("a", "failed"): 1})
    budgets = [policy.draft_budget(sequence(0, length)) for length in (7, 8)]
    assert budgets == [DraftBudget("a", 0), DraftBudget("b", 4)]


def test_certain_drafts_of_every_second_text_have_wrong_tokens() -> None:
    text = [10, 11, 12, 13, 14, 15, 16]
    assert proposed(0, text, 2)[0] == text[2:6]
    ids, _ = proposed(1, text, 2)
    assert [position for position, token in enumerate(ids, start=2) if token != text[position]] == [3]


def test_a_script_replaces_the_drafts_and_empty_drafts_repeat_the_text() -> None:
    text, script = [10, 11, 12, 13, 14, 15, 16], [10, 11, 22, 23, 24, 25, 26]
    ids, _ = proposed(1, text, 2, script)
    assert [ids[0], ids[2], ids[3]] == [22, 24, 25]
    ids, _ = proposed(1, text[:4], 4)
    assert ids[:2] == [10, 11]


def test_the_first_draft_token_of_a_step_is_recorded_with_its_position() -> None:
    text = [10, 11, 12, 13, 14]
    ids, record = proposed(0, text, 2)
    assert record.first_laws == {0: {2: ids[0]}}
    assert (record.num_drafted, record.num_sampled) == (3, 0)


def test_a_recorded_drafter_reads_its_own_hidden_states() -> None:
    class Reading(ScriptedDrafter):
        taps = (2, 5)

    reading = RecordedDrafter(Reading(lambda request: []), Record(), {}, 3)
    assert DrafterGroup({"a": reading}).taps == (2, 5)
    assert DrafterGroup({"a": RecordedDrafter(ScriptedDrafter(lambda request: []), Record(), {}, 3)}).taps == ()
