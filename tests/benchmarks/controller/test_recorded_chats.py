"""Replayed chats have the tokens of the record, and the stated times."""

from __future__ import annotations

import pytest

from benchmarks.controller.recorded_chats import BOTH, LOOKUP, MODEL, Chat, System, Times

TIMES = Times([1.0, 1.1, 1.2], [0.3, 0.5] + [1.0] * 6)
STILL = (0.0, 0.0)


def chat(*, right: int, num_new: int = 31) -> Chat:
    """A chat in which the head has the first `right` of its two tokens right, and the lookup finds nothing."""
    tokens = [1, 2, *range(10, 10 + num_new)]
    drafts = {start: {LOOKUP: [], MODEL: [*tokens[start : start + right], 0, 0][:2]} for start in range(3, len(tokens))}
    return Chat(tokens, 2, 0.0, drafts)


def test_the_right_tokens_are_those_before_the_first_wrong_one() -> None:
    one = chat(right=2)
    assert [one.num_right(2, ids) for ids in ([], [10, 11], [10, 0, 12], [0, 11])] == [0, 2, 1, 0]
    assert one.num_right(len(one.tokens) - 1, [40, 41]) == 1, "the text ends there"


@pytest.mark.parametrize(
    ("drafter", "right", "num_steps"), [(MODEL, 0, 30), (MODEL, 1, 15), (MODEL, 2, 10), (BOTH, 2, 10)]
)
def test_the_rate_is_that_of_the_record_and_the_times(drafter: str, right: int, num_steps: int) -> None:
    """The step that reads the prompt writes one token, and only a head's first draft is slower."""
    seconds = 1.1 + num_steps * (1.2 + 0.5) + 0.5
    rate = System.fixed(drafter, 2).rate([chat(right=right)], TIMES, 0, STILL)
    assert rate == pytest.approx(31 / seconds, rel=0.03)


def test_passes_beyond_the_stated_ones_go_on_like_the_last() -> None:
    assert [TIMES.of_pass(rows) for rows in (1, 3, 5)] == pytest.approx([1.0, 1.2, 1.4])


def test_auto_drafts_where_the_head_is_right_and_not_where_it_is_wrong() -> None:
    plain, auto = System.fixed(LOOKUP, 0), System.auto(MODEL)
    rates = [
        [system.rate([chat(right=right, num_new=2000)], TIMES, 0, STILL) for system in (plain, auto)]
        for right in (0, 2)
    ]
    assert rates[0][1] >= 0.97 * rates[0][0]
    assert rates[1][1] >= 1.5 * rates[1][0]
