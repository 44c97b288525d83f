"""What drafters that ask others count."""

from __future__ import annotations

import pytest

from foredraft.drafters._combined import CountedMeans


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
