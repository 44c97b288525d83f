"""Estimates how many tokens trees yield, and which trees to draft: those of the nodes that are most likely to be accepted.

The chance of a node is the product of the rates on its path. The rate of a first child is counted by depth, as in a chain. That of
the next children is counted by rank, for all depths together: of the nodes whose more likely children were rejected, the share in
which this one was accepted (the positional acceptance of Sequoia, arXiv:2402.12374). The best tree of n nodes has the n most likely
nodes; a limit on its depth saves draft passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.policy.acceptance import NUM_BUCKETS, AcceptanceEstimator, Forecast, LevelEstimator
from foredraft.policy.decay import Decay

_SIBLING_RATES = (0.35, 0.2, 0.2)
"""The assumed rates of the second and later children, given that those before them were rejected, before anything was counted: about
what benchmarks/drafters/sibling_acceptance.py measures. No node has more children."""


class TreeForecast(NamedTuple):
    """The expected results of drafts of this shape. num_tokens, num_rows: as in Forecast."""

    shape: TreeShape
    num_tokens: float
    num_rows: float


TreeForecasts: TypeAlias = Mapping[tuple[int, int], TreeForecast]
"""By the maximum number of levels and the number of nodes, which is larger. Otherwise a chain would do."""


@dataclass(slots=True)
class _Counts:
    """Decaying counts. evaluated, accepted: for first children, by depth. missed, stood: for their siblings, by rank: nodes at which all
    more likely children were rejected, and those of them at which this one was accepted. nodes: [wanted, drafted]."""

    evaluated: list[float]
    accepted: list[float]
    missed: list[float]
    stood: list[float]
    nodes: list[float]
    decay: Decay
    forecasts: tuple[Forecast, TreeForecasts] | None = field(default=None)

    @classmethod
    def zeros(cls, max_depth: int) -> _Counts:
        num_ranks = len(_SIBLING_RATES)
        counts = [0.0] * max_depth, [0.0] * max_depth, [0.0] * num_ranks, [0.0] * num_ranks, [0.0, 0.0]
        return cls(*counts, Decay(*counts))

    def record(self, fans: Sequence[int], ranks: Sequence[int], num_wanted: int, num_drafted: int) -> None:
        weight = self.decay.next_weight()
        self.nodes[0] += weight * num_wanted
        self.nodes[1] += weight * num_drafted
        for depth, num_children in enumerate(fans):
            rank = ranks[depth] if depth < len(ranks) else num_children
            self._record_node(depth, rank, min(num_children, 1 + len(self.missed)), weight)
        self.forecasts = None

    def _record_node(self, depth: int, rank: int, num_children: int, weight: float) -> None:
        """Count one node. rank: of the accepted child; num_children or more if none was accepted."""
        self.evaluated[depth] += weight
        self.accepted[depth] += weight * (rank == 0)
        for sibling in range(1, min(rank + 1, num_children)):
            self.missed[sibling - 1] += weight
            self.stood[sibling - 1] += weight * (sibling == rank)

    def sibling_rates(self, prior: Sequence[float]) -> list[float]:
        return self.decay.shares(self.stood, self.missed, prior)

    def rates(self, prior: Sequence[float]) -> list[float]:
        return self.decay.shares(self.accepted, self.evaluated, prior)

    def fill_rate(self, prior: float) -> float:
        wanted, drafted = self.nodes
        return self.decay.share(drafted, wanted, prior)


class TreeEstimator(LevelEstimator):
    """The acceptance of one drafter's trees, by bucket as in AcceptanceEstimator. chains: of the same drafter, whose rates are the
    priors for first children."""

    def __init__(self, chains: AcceptanceEstimator) -> None:
        self._chains = chains
        self._all = _Counts.zeros(chains.max_draft)
        self._buckets = [_Counts.zeros(chains.max_draft) for _ in range(NUM_BUCKETS)]
        super().__init__([counts.decay for counts in self._buckets])

    def record(self, bucket: int, fans: Sequence[int], ranks: Sequence[int], num_wanted: int, num_drafted: int) -> None:
        """Count one draft of a text in this bucket. ranks: of the accepted tokens among their siblings. fans: the numbers of children of
        the pending token and of each accepted token. num_wanted, num_drafted: numbers of nodes."""
        for counts in (self._all, self._buckets[bucket]):
            counts.record(fans, ranks, num_wanted, num_drafted)

    def forecasts(self, bucket: int) -> TreeForecasts:
        counts, of_chains = self._buckets[bucket], self._chains.forecast(bucket)
        if counts.forecasts is None or counts.forecasts[0] is not of_chains:
            counts.forecasts = of_chains, self._compute_forecasts(counts, bucket)
        return counts.forecasts[1]

    def _compute_forecasts(self, counts: _Counts, bucket: int) -> TreeForecasts:
        rates = counts.rates(self._chains.rates(bucket))
        sibling_rates = counts.sibling_rates(self._all.sibling_rates(_SIBLING_RATES))
        fill_rate = counts.fill_rate(self._all.fill_rate(1.0))
        max_nodes = self._chains.max_draft
        forecasts = {}
        for max_depth in range(1, max_nodes):
            parents, chances = best_first(rates[:max_depth], sibling_rates, max_nodes)
            for num_nodes in range(max_depth + 1, len(parents) + 1):
                num_accepted = sum(chances[:num_nodes])
                num_rows = max(fill_rate * num_nodes, num_accepted)
                shape = _shape_of(tuple(parents[:num_nodes]))
                forecasts[max_depth, num_nodes] = TreeForecast(shape, 1.0 + num_accepted, num_rows)
        return forecasts


def best_first(rates: Sequence[float], sibling_rates: Sequence[float], max_nodes: int) -> tuple[list[int], list[float]]:
    """The most likely nodes in descending order. -> the parent of each, and its chance

    rates: the acceptance rates of first children, one for each level. sibling_rates: those of the next children, by rank, given that
    the more likely ones were rejected.
    """
    parents: list[int] = []
    chances: list[float] = []
    # -chance, depth, the order of arrival, parent, rank, chance that the more likely siblings are rejected
    candidates = [(-rates[0], 0, 0, ROOT, 0, 1.0)]
    num_seen = 1
    while candidates and len(parents) < max_nodes:
        negated, depth, _, parent, rank, before = heapq.heappop(candidates)
        chance = -negated
        node = len(parents)
        parents.append(parent)
        chances.append(chance)
        if rank < len(sibling_rates):
            rest = before - chance
            sibling = (-rest * sibling_rates[rank], depth, num_seen, parent, rank + 1, rest)
            heapq.heappush(candidates, sibling)
        if depth + 1 < len(rates):
            child = (-chance * rates[depth + 1], depth + 1, num_seen + 1, node, 0, chance)
            heapq.heappush(candidates, child)
        num_seen += 2
    return parents, chances


@lru_cache(maxsize=1024)
def _shape_of(parents: tuple[int, ...]) -> TreeShape:
    """The same object for the same tree, since a shape caches what it computes."""
    return TreeShape(parents)
