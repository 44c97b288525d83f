"""Forecasts for trees agree with past outcomes, and no other tree of the same size has a higher forecast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.policy.acceptance import NUM_BUCKETS, AcceptanceEstimator
from foredraft.policy.tree_acceptance import TreeEstimator, best_first

MAX_DRAFT = 6
BUCKET = 4


def all_trees(num_nodes: int) -> Iterator[TreeShape]:
    """Every shape of this many nodes; some occur more than once."""
    return (TreeShape(parents) for parents in product(*(range(ROOT, node) for node in range(num_nodes))))


def chance_of(shape: TreeShape, rates: Sequence[float], siblings: Sequence[float]) -> float:
    """The expected number of accepted nodes, if each child is accepted at its rate when those before it were rejected."""
    chances = {ROOT: 1.0}
    for node, children in shape.children.items():
        rest = chances[node]
        depth = 0 if node == ROOT else shape.depths[node]
        for rank, child in enumerate(children):
            rate = rates[depth] if rank == 0 else siblings[rank - 1] if rank <= len(siblings) else 0.0
            chances[child] = rest * rate
            rest -= chances[child]
    return sum(chances.values()) - 1.0


def taken(chance: Random, shape: TreeShape, rates: Sequence[float], siblings: Sequence[float]) -> list[int]:
    """Draw the ranks of the accepted tokens."""
    ranks: list[int] = []
    node = ROOT
    while node in shape.children:
        children = shape.children[node]
        own = [rates[len(ranks)], *siblings]
        rank = next((r for r in range(len(children)) if r < len(own) and chance.random() < own[r]), None)
        if rank is None:
            break
        ranks.append(rank)
        node = children[rank]
    return ranks


rates = st.lists(st.floats(0.05, 0.95), min_size=5, max_size=5).map(lambda values: sorted(values, reverse=True))
sibling_rates = st.lists(st.floats(0.0, 1.0), min_size=2, max_size=2)


@given(
    st.floats(0.5, 0.95), st.lists(st.floats(0.0, 0.5), min_size=2, max_size=2), st.integers(1, 5), st.integers(1, 5)
)
def test_no_tree_of_the_same_size_and_depth_has_a_higher_forecast(
    rate: float, siblings: list[float], num_nodes: int, max_depth: int
) -> None:
    """First children are likelier than the second here, and the second than the third; then the greedy order is optimal."""
    siblings = [siblings[0], min(siblings[1], siblings[0] / (1 - siblings[0] + 1e-9))]
    parents, chances = best_first([rate] * max_depth, siblings, num_nodes)
    found = TreeShape(tuple(parents))
    assert found.depth <= max_depth
    assert sum(chances) == pytest.approx(chance_of(found, [rate] * 5, siblings))
    best = max(
        chance_of(shape, [rate] * 5, siblings)
        for shape in all_trees(len(found))
        if shape.depth <= max_depth and max(map(len, shape.children.values())) <= 3
    )
    assert sum(chances) == pytest.approx(best)


@given(rates, sibling_rates, st.integers(1, 5))
def test_every_beginning_of_a_best_first_tree_is_a_tree(
    own: list[float], siblings: list[float], num_nodes: int
) -> None:
    parents, chances = best_first(own, siblings, num_nodes)
    for size in range(1, len(parents) + 1):
        shape = TreeShape(tuple(parents[:size]))
        assert sum(chances[:size]) == pytest.approx(chance_of(shape, own, siblings))


@pytest.mark.parametrize(
    ("first", "siblings"), [(0.6, (0.4, 0.2, 0.1)), (0.2, (0.1, 0.3, 0.2)), (0.9, (0.5, 0.5, 0.5))]
)
def test_forecasts_converge_to_the_true_expectation(first: float, siblings: tuple[float, ...]) -> None:
    chance = Random(3)
    trees = TreeEstimator(AcceptanceEstimator(MAX_DRAFT))
    shapes = list(all_trees(5))
    own = [first * 0.9**depth for depth in range(MAX_DRAFT)]
    promised, expected = [], []
    for turn in range(6000):
        shape = chance.choice(shapes)
        ranks = taken(chance, shape, own, siblings)
        trees.record(BUCKET, shape.fans(ranks), ranks, len(shape), len(shape))
        if turn > 1000 and turn % 20 == 0:
            for (max_depth, num_nodes), forecast in trees.forecasts(BUCKET).items():
                assert len(forecast.shape) == num_nodes
                assert forecast.shape.depth <= max_depth < num_nodes
                assert forecast.num_rows == pytest.approx(num_nodes, rel=0.01)
                promised.append(forecast.num_tokens - 1)
                expected.append(chance_of(forecast.shape, own, siblings))
    assert sum(promised) / len(promised) == pytest.approx(sum(expected) / len(expected), rel=0.05)


def test_before_any_tree_first_children_are_forecast_as_in_chains() -> None:
    chains = AcceptanceEstimator(MAX_DRAFT)
    for _ in range(400):
        chains.record(BUCKET, 4, 4, 0)
    trees = TreeEstimator(chains)
    wide = trees.forecasts(BUCKET)[1, 2]
    assert wide.num_tokens - 1 < 0.45, "hardly any first child stands, and siblings are guessed"
    for _ in range(400):
        chains.record(BUCKET, 4, 4, 4)
    assert trees.forecasts(BUCKET)[1, 2].num_tokens - 1 > 0.8


def test_sibling_rates_learned_in_one_bucket_apply_to_all() -> None:
    trees, fresh = (TreeEstimator(AcceptanceEstimator(MAX_DRAFT)) for _ in range(2))
    for _ in range(300):
        trees.record(BUCKET, [2], [1], 2, 2)
    for bucket in set(range(NUM_BUCKETS)) - {BUCKET}:
        assert trees.forecasts(bucket)[1, 2].num_tokens > fresh.forecasts(bucket)[1, 2].num_tokens


def test_trees_that_are_drafted_smaller_cost_fewer_rows() -> None:
    trees = TreeEstimator(AcceptanceEstimator(MAX_DRAFT))
    shape = TreeShape((ROOT, ROOT, 0, 0))
    for _ in range(400):
        trees.record(BUCKET, shape.fans([]), [], len(shape), 1)
    assert trees.forecasts(BUCKET)[2, 4].num_rows == pytest.approx(1.0, abs=0.1)


def test_the_counts_of_levels_are_restored() -> None:
    before, again = (TreeEstimator(AcceptanceEstimator(MAX_DRAFT)) for _ in range(2))
    shape = TreeShape((-1, -1, 0))
    for turn in range(400):
        ranks = ((0, 0), (1,), (1,), ())[turn % 4]
        before.record(BUCKET, shape.fans(ranks), ranks, len(shape), len(shape))
    again.restore(before.levels())
    for (max_depth, num_nodes), forecast in before.forecasts(BUCKET).items():
        if num_nodes <= 3:
            assert again.forecasts(BUCKET)[max_depth, num_nodes].num_tokens == pytest.approx(
                forecast.num_tokens, rel=0.2
            )
