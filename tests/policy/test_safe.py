"""A policy whose errors end no request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foredraft.engine.sequence import TokenSequence
from foredraft.policy import Ask, FixedPolicy, SafePolicy
from tests.laws import sampler_for


class Fails(FixedPolicy):
    def ask(self, sequence: TokenSequence) -> Ask:
        raise KeyError("ask")

    def rest(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        raise KeyError("rest")

    def resting(self) -> dict[str, str]:
        raise KeyError("resting")


def sequence() -> TokenSequence:
    return TokenSequence(0, [1, 2], sampler_for({}), max_len=50, speculative_tokens=3)


def test_it_says_what_the_policy_says() -> None:
    inner = FixedPolicy("a")
    policy = SafePolicy(inner)
    policy.begin([])
    assert policy.ask(sequence()) == Ask("a", 3)
    assert policy.rest(["a"], "memory_short", 4) == ["a"]
    assert policy.resting() == inner.resting() == {"a": "memory_short"}
    assert policy.fallbacks is inner.fallbacks


def test_where_it_cannot_decide_nothing_is_drafted(caplog: pytest.LogCaptureFixture) -> None:
    policy = SafePolicy(Fails("a"))
    policy.begin([])
    assert policy.ask(sequence()).max_draft == 0
    assert policy.rest(["a"], "memory_short", 4) == []
    assert policy.resting() == {}
    assert len(caplog.records) == 1
