"""Budgets of the fixed policy, and cooldowns."""

from __future__ import annotations

import pytest

from foredraft.engine.sequence import TokenSequence
from foredraft.policy import FixedPolicy
from tests.laws import sampler_for


@pytest.mark.parametrize("wanted", [0, 1, 4, 16])
@pytest.mark.parametrize("room", [0, 1, 2, 5, 100])
def test_budgets_never_exceed_the_request_or_the_room_left(wanted: int, room: int) -> None:
    sequence = TokenSequence(0, [1, 2], sampler_for({}), max_len=2 + room, speculative_tokens=wanted)
    length = FixedPolicy("one").draft_budget(sequence).max_draft
    assert 0 <= length <= wanted
    assert length == 0 or length + 1 <= room  # the last token of a text is always the target's own
    assert length == wanted or length + 1 >= room


def test_the_decision_does_not_depend_on_the_tokens() -> None:
    """Non-anticipation: whatever the last draft was, the next budget is the same."""
    lengths = set()
    for tokens in ([1, 2, 3], [3, 3, 3], [0, 9, 9]):
        sequence = TokenSequence(0, list(tokens), sampler_for({}), max_len=20, speculative_tokens=4)
        lengths.add(FixedPolicy("one").draft_budget(sequence).max_draft)
    assert len(lengths) == 1


def test_a_drafter_is_not_used_during_its_cooldown() -> None:
    sequence = TokenSequence(0, [1, 2], sampler_for({}), max_len=200, speculative_tokens=4)
    policy = FixedPolicy("one")
    assert policy.cool_down(["another"], "memory_short", 3) == ["another"]
    assert policy.draft_budget(sequence).max_draft == 4
    assert policy.cool_down(["one"], "memory_short", 3) == ["one"]
    assert policy.cool_down(["one"], "memory_short", 2) == []
    assert policy.cooldowns()["one"] == "memory_short"
    lengths = []
    for _ in range(5):
        policy.begin([sequence])
        lengths.append(policy.draft_budget(sequence).max_draft)
    assert lengths == [0, 0, 0, 4, 4]
    assert policy.cooldowns() == {}
    assert policy.fallbacks == {("another", "memory_short"): 1, ("one", "memory_short"): 1}
