"""What drafters that ask others have in common: what they count, and whom they let forget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.drafters.combined import CountedMeans
from foredraft.engine.proposal import DraftRequest
from tests.drafters.test_hybrid import hybrid
from tests.drafters.test_merged import Fixed, merged


def test_a_mean_begins_with_its_prior_and_follows_what_is_counted() -> None:
    means = CountedMeans[int](lambda key: float(key))
    assert (means.of(2), means.of(5)) == (2.0, 5.0)
    for value in [4.0] * 1000 + [0.0] * 1000:
        means.count(2, value)
    assert means.of(2) < 0.2
    assert means.of(5) == 5.0


def test_few_observations_weigh_as_much_as_the_prior() -> None:
    means = CountedMeans[str](lambda _: 1.0)
    for _ in range(6):
        means.count("a", 3.0)
    assert means.of("a") == pytest.approx(2.0)


@pytest.mark.parametrize("combined", [merged, hybrid])
def test_forget_reaches_the_parts_and_retain_does_not_forget(
    combined: Callable[..., Any], make_request: Callable[..., DraftRequest]
) -> None:
    parts = Fixed([5]), Fixed([6])
    drafter = combined(*parts)
    drafter.propose([make_request(seq_id, [1, 2], 4) for seq_id in range(3)])
    drafter.retain(0, [1, 2])
    assert [part.forgotten for part in parts] == [[], []]
    drafter.forget([1, 2])
    assert [part.forgotten for part in parts] == [[1, 2], [1, 2]]
    assert not drafter._histories


@pytest.mark.parametrize("combined", [merged, hybrid])
def test_changed_parts_are_asked_in_place_of_the_old_ones(
    combined: Callable[..., Any], make_request: Callable[..., DraftRequest]
) -> None:
    parts = Fixed([5]), Fixed([5])
    changed = combined(*parts).with_parts(lambda part: Fixed([7]))
    assert isinstance(changed, type(combined(*parts)))
    assert changed.propose([make_request(0, [1, 2], 4)]).draft_ids == [[7]]
    changed.forget([0])
    assert [part.forgotten for part in parts] == [[], []]
