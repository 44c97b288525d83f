"""Computed gains of trees, on records whose answers are known."""

from __future__ import annotations

import pytest

from benchmarks.drafters.tree_gains import MOST_LEVELS, Costs, Ranks, best_shapes, path_in, rates, walked
from foredraft.engine.token_tree import TreeShape

FREE = Costs((1.0, 1.0), 0.0, 0.0, 8)
TREE = TreeShape.of_paths([(0,), (1,), (0, 0), (1, 0), (1, 1)])


def answer(*ranks: int) -> Ranks:
    """An answer whose tokens have these ranks at every place of a draft."""
    return [[rank] * MOST_LEVELS for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "accepted"), [((0, 0, 0), 2), ((0, 1), 1), ((1, 1), 2), ((2, 0), 0), ((1,), 1), ((), 0)]
)
def test_a_tree_accepts_the_tokens_on_one_of_its_paths(ranks: tuple[int, ...], accepted: int) -> None:
    assert len(path_in(answer(*ranks), TREE)) == accepted


def test_the_walk_counts_tokens_steps_and_costs() -> None:
    """The prompt's pass writes the first token. Then two steps write three tokens and one."""
    costs = Costs((1.0, 1.0, 1.0, 1.0, 1.0, 1.5), 0.1, 0.2, 8)
    assert walked([answer(9, 1, 1, 9, 9)], TREE, costs) == (
        pytest.approx(2.0),
        pytest.approx(5 / (1 + 2 * (1.5 + 0.1 + 0.4))),
    )


def test_rates_are_counted_where_the_likelier_were_rejected() -> None:
    first, siblings = rates([answer(9, 0, 1), answer(9, 1, 9)])
    assert first[:2] == [pytest.approx(1 / 4), 0.0]
    assert siblings[0] == pytest.approx((1 + 1 + 1) / (3 + 1 + 1)), "of the ranks 1 where rank 0 was wrong"


def test_where_rows_are_free_the_tree_has_the_right_siblings() -> None:
    answers = [answer(9, *[1, 0] * 20)]
    chain, tree = best_shapes(answers, FREE)
    assert chain.is_chain
    assert walked(answers, tree, FREE)[1] > 1.4 * walked(answers, chain, FREE)[1]
