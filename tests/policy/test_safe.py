"""A policy whose errors end no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft.engine.sequence import TokenSequence
from foredraft.policy import DraftBudget, FixedPolicy, SafePolicy
from tests.laws import sampler_for


class Fails(FixedPolicy):
    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        raise KeyError("draft_budget")

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        raise KeyError("cool_down")

    def cooldowns(self) -> dict[str, str]:
        raise KeyError("cooldowns")


def sequence() -> TokenSequence:
    return TokenSequence(0, [1, 2], sampler_for({}), max_len=50, speculative_tokens=3)


def test_a_safe_policy_decides_as_the_wrapped_one() -> None:
    inner = FixedPolicy("a")
    policy = SafePolicy(inner, ["a"])
    policy.begin([])
    assert policy.draft_budget(sequence()) == DraftBudget("a", 3)
    assert policy.cool_down(["a"], "memory_short", 4) == ["a"]
    assert policy.cooldowns() == inner.cooldowns() == {"a": "memory_short"}
    assert policy.fallbacks is inner.fallbacks


def test_if_the_policy_fails_nothing_is_drafted(caplog: pytest.LogCaptureFixture) -> None:
    policy = SafePolicy(Fails("a"), ["a"])
    policy.begin([])
    assert policy.draft_budget(sequence()).max_draft == 0
    assert policy.cool_down(["a"], "memory_short", 4) == []
    assert policy.cooldowns() == {}
    assert len(caplog.records) == 1


class Answers(FixedPolicy):
    def __init__(self, answer: Any) -> None:
        super().__init__("a")
        self.answer = answer

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "must return a DraftBudget of 0 or more draft tokens, not None"),
        (("a", 3, None), "must return a DraftBudget"),
        (DraftBudget("a", -3), "0 or more draft tokens, not DraftBudget"),
        (DraftBudget("a", 2.5), "0 or more draft tokens"),  # type: ignore[arg-type]
        (DraftBudget("a", True), "0 or more draft tokens"),
        (DraftBudget("b", 3), "named the drafter 'b': it must be one of a"),
    ],
)
def test_an_invalid_budget_counts_as_a_failure_and_nothing_is_drafted(
    answer: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert SafePolicy(Answers(answer), ["a"]).draft_budget(sequence()) == DraftBudget("", 0)
    (record,) = caplog.records
    assert message in record.getMessage()
