"""How many draft tokens are asked for."""

from __future__ import annotations

import pytest

from foredraft.policy import FixedPolicy
from foredraft.sequence import TokenSequence
from tests.laws import sampler_for


@pytest.mark.parametrize("wanted", [0, 1, 4, 16])
@pytest.mark.parametrize("room", [0, 1, 2, 5, 100])
def test_never_more_than_asked_for_and_never_one_that_could_not_be_emitted(wanted: int, room: int) -> None:
    sequence = TokenSequence(0, [1, 2], sampler_for({}), max_len=2 + room, speculative_tokens=wanted)
    length = FixedPolicy("one").ask(sequence).max_draft
    assert 0 <= length <= wanted
    assert length == 0 or length + 1 <= room  # the last token of a text is the target's own
    assert length == wanted or length + 1 >= room


def test_the_decision_does_not_depend_on_the_tokens() -> None:
    """Non-anticipation: whatever the last draft was, the next length is the same."""
    lengths = set()
    for tokens in ([1, 2, 3], [3, 3, 3], [0, 9, 9]):
        sequence = TokenSequence(0, list(tokens), sampler_for({}), max_len=20, speculative_tokens=4)
        lengths.add(FixedPolicy("one").ask(sequence).max_draft)
    assert len(lengths) == 1


def test_a_drafter_that_gave_up_its_memory_is_left_alone_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    sequence = TokenSequence(0, [1, 2], sampler_for({}), max_len=200, speculative_tokens=4)
    policy = FixedPolicy("one")
    policy.memory_short(["another"])
    assert policy.ask(sequence).max_draft == 4
    policy.memory_short(["one"])
    assert policy.ask(sequence).max_draft == 0
    assert policy.resting()["one"] == "memory_short"
    assert "one gave up its own" in caplog.text
    for _ in range(40):
        policy.begin([sequence])
    assert policy.ask(sequence).max_draft == 4
    assert policy.resting() == {}
