"""Finds the drafts with the most expected tokens per second, from forecasts and costs. It keeps no state and reads no tokens.

This is the model of arXiv:2211.17192 with a cost for verification: expected tokens, divided by the time of drafting and of a pass
with that many rows. It is the goodput of TurboSpec (arXiv:2406.14066), but a draft may have length zero or be a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from foredraft.policy.acceptance import Forecast
from foredraft.policy.base import NO_DRAFTING, DraftBudget
from foredraft.policy.tree_acceptance import TreeForecasts

_MIN_GAIN = 1.03
"""The expected rate with drafts must be this many times that of plain decoding. Measurements cannot resolve smaller gains."""
_TREE_MARGIN = 1.02
"""A tree is preferred to chains if it promises this many times their rate."""
_LOOKUP_MARGIN = 1.05
"""The same for a lookup alone, where there is a hybrid that asks it first. While the lookup is used, nothing is learned about the hybrid."""


class TimeModel(Protocol):
    """See CostModel."""

    def step_time(
        self, num_sequences: int, num_rows: float, *, sampled: bool, is_tree: bool = False
    ) -> float | None: ...

    def draft_time(
        self, drafter: str, num_requests: int, depth: int, *, sampled: bool, is_tree: bool = False
    ) -> float: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """The options for one sequence. max_draft: the most draft tokens that could be emitted. forecasts, trees: by drafter; trees only
    for those that grow them. start_times: by drafter, the time to read the tokens it has missed, spread over the steps for which it is
    expected to be used. fixed: the budget of a sequence that has one of its own."""

    max_draft: int
    forecasts: Mapping[str, Forecast]
    start_times: Mapping[str, float] = field(default_factory=dict)
    fixed: DraftBudget | None = None
    trees: Mapping[str, TreeForecasts] = field(default_factory=dict)

    def expected(self, draft: Draft) -> tuple[float, float]:
        """-> the expected numbers of emitted tokens and of verified draft tokens"""
        if draft.is_tree:
            tree = self.trees[draft.drafter][draft.depth, draft.num_nodes]
            return tree.num_tokens, tree.num_rows
        forecast = self.forecasts[draft.drafter]
        return forecast.num_tokens[draft.num_nodes], forecast.num_rows[draft.num_nodes]

    def budget(self, draft: Draft) -> DraftBudget:
        if self.fixed is not None:
            return self.fixed
        shape = self.trees[draft.drafter][draft.depth, draft.num_nodes].shape if draft.is_tree else None
        return DraftBudget(draft.drafter, draft.num_nodes, shape) if draft.num_nodes else NO_DRAFTING

    def limited(self, draft: Draft) -> Draft:
        """The draft, limited to what this sequence can use."""
        if self.fixed is not None:
            return Draft(self.fixed.drafter, self.fixed.max_draft, self.fixed.max_draft)
        num_nodes = min(draft.num_nodes, self.max_draft)
        if not num_nodes or draft.drafter not in self.forecasts:
            return NO_DRAFT
        return Draft(draft.drafter, min(draft.depth, num_nodes), num_nodes)

    def drafts(self) -> Iterator[Draft]:
        """All drafts that this sequence could have."""
        for drafter in self.forecasts:
            yield from (Draft(drafter, depth, depth) for depth in range(1, self.max_draft + 1))
        for drafter, trees in self.trees.items():
            yield from (Draft(drafter, depth, nodes) for depth, nodes in trees if nodes <= self.max_draft)


class Draft(NamedTuple):
    """A chain if depth and num_nodes are equal, else the best tree with num_nodes nodes and at most depth levels."""

    drafter: str
    depth: int
    num_nodes: int

    @property
    def is_tree(self) -> bool:
        return self.depth < self.num_nodes


NO_DRAFT = Draft("", 0, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """budgets: one for each candidate. num_tokens, seconds: expected for the step."""

    budgets: list[DraftBudget]
    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def best_plan(
    candidates: Sequence[Candidate], times: TimeModel, *, sampled: bool, asked_first: str | None = None
) -> Plan | None:
    """The plan with the most expected tokens per second over all candidates; None if the target's times are unknown. asked_first: the lookup
    that another of the drafters asks first, if there is one.

    First it finds the best draft that is the same for all, since a drafter drafts for all of them in one pass. Then it finds each
    candidate's own best draft, with that plan's rate as the price of time. Candidates that are the same object are planned as one.
    """
    batch = _Batch(candidates, times, sampled, asked_first)
    plain = batch.outlook(batch.uniform(NO_DRAFT))
    if plain is None:
        return None
    best = max(plain, batch.best_common() or plain, key=lambda outlook: outlook.rate)
    if len(candidates) > 1:
        refined = batch.outlook(batch.individual(best))
        if refined is not None and refined.rate > best.rate:
            best = refined
    chosen = best if best.rate > _MIN_GAIN * plain.rate else plain
    return Plan(batch.budgets(candidates, chosen.drafts), chosen.num_tokens, chosen.seconds)


class _Outlook(NamedTuple):
    """drafts: one for each distinct candidate. num_rows, num_tokens, seconds: expected draft tokens, emitted tokens and time."""

    drafts: list[Draft]
    num_rows: float
    num_tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


class _Batch:
    """The candidates of one step."""

    def __init__(
        self, candidates: Sequence[Candidate], times: TimeModel, sampled: bool, asked_first: str | None
    ) -> None:
        counts = Counter(map(id, candidates))
        by_id = {id(candidate): candidate for candidate in candidates}
        self._distinct = [(by_id[key], count) for key, count in counts.items()]
        self._size = len(candidates)
        self._times = times
        self._sampled = sampled
        self._asked_first = asked_first
        self._draft_times: dict[tuple[str, bool, int, int], float] = {}

    def common_drafts(self) -> list[Draft]:
        """All drafts that any candidate could have."""
        kinds = {(c.max_draft, *c.forecasts, None, *c.trees): c for c, _ in self._distinct}
        return list(dict.fromkeys(draft for candidate in kinds.values() for draft in candidate.drafts()))

    def budgets(self, candidates: Sequence[Candidate], drafts: Sequence[Draft]) -> list[DraftBudget]:
        """The budget of each candidate. drafts: one for each distinct candidate."""
        places = {id(candidate): place for place, (candidate, _) in enumerate(self._distinct)}
        return [candidate.budget(drafts[places[id(candidate)]]) for candidate in candidates]

    def best_common(self) -> _Outlook | None:
        """The outlook of the best draft that is the same for all; None if there is none."""
        best, best_value = None, 0.0
        for draft in self.common_drafts():
            outlook = self.outlook(self.uniform(draft))
            value = 0.0 if outlook is None else outlook.rate / self._margin(draft)
            if value > best_value:
                best, best_value = outlook, value
        return best

    def uniform(self, draft: Draft) -> list[Draft]:
        """The same draft for all, limited to what each can use."""
        return [candidate.limited(draft) for candidate, _ in self._distinct]

    def outlook(self, drafts: list[Draft]) -> _Outlook | None:
        """The expected tokens and time of these drafts; None if the target's time is unknown."""
        num_tokens, num_rows, start_time = 0.0, 0.0, 0.0
        depths: dict[tuple[str, bool], tuple[int, int]] = {}
        for (candidate, number), draft in zip(self._distinct, drafts, strict=True):
            if not draft.num_nodes:
                num_tokens += number
                continue
            own_tokens, own_rows = candidate.expected(draft)
            num_tokens += number * own_tokens
            num_rows += number * own_rows
            start_time += number * candidate.start_times.get(draft.drafter, 0.0)
            kind = draft.drafter, draft.is_tree
            count, depth = depths.get(kind, (0, 0))
            depths[kind] = (count + number, max(depth, draft.depth))
        has_trees = any(is_tree for _, is_tree in depths)
        step_time = self._times.step_time(self._size, self._size + num_rows, sampled=self._sampled, is_tree=has_trees)
        if step_time is None:
            return None
        draft_time = sum(self._draft_time(*kind, *of_kind) for kind, of_kind in depths.items())
        return _Outlook(drafts, num_rows, num_tokens, step_time + draft_time + start_time)

    def _draft_time(self, drafter: str, is_tree: bool, count: int, depth: int) -> float:
        key = drafter, is_tree, count, depth
        if key not in self._draft_times:
            self._draft_times[key] = self._times.draft_time(
                drafter, count, depth, sampled=self._sampled, is_tree=is_tree
            )
        return self._draft_times[key]

    def individual(self, outlook: _Outlook) -> list[Draft]:
        """Each candidate's best draft, if a second costs as many tokens as the outlook yields in one. A draft no deeper than the
        outlook's costs only its rows, since the drafter runs for the others anyway; any other draft costs all its time."""
        rate, row_time = outlook.rate, self._row_time(outlook)
        depths: dict[tuple[str, bool], int] = {}
        for draft in outlook.drafts:
            kind = draft.drafter, draft.is_tree
            depths[kind] = max(depths.get(kind, 0), draft.depth)
        draft_times = {
            (name, depth, is_tree): 0.0
            if depth <= depths.get((name, is_tree), 0)
            else self._draft_time(name, is_tree, 1, depth)
            for name, depth, is_tree in {(each.drafter, each.depth, each.is_tree) for each in self.common_drafts()}
        }
        return [self._best_draft(candidate, rate, row_time, draft_times) for candidate, _ in self._distinct]

    def _best_draft(
        self, candidate: Candidate, rate: float, row_time: float, draft_times: Mapping[tuple[str, int, bool], float]
    ) -> Draft:
        if candidate.fixed is not None:
            return candidate.limited(NO_DRAFT)
        best, best_value = NO_DRAFT, 1.0
        for draft in candidate.drafts():
            num_tokens, num_rows = candidate.expected(draft)
            seconds = row_time * num_rows + draft_times[draft.drafter, draft.depth, draft.is_tree]
            value = num_tokens - rate * (seconds + candidate.start_times.get(draft.drafter, 0.0))
            value -= (self._margin(draft) - 1.0) * num_tokens
            if value > best_value:
                best, best_value = draft, value
        return best

    def _margin(self, draft: Draft) -> float:
        """How many times the rate of other drafts this one must promise to be preferred."""
        if draft.is_tree:
            return _TREE_MARGIN
        return _LOOKUP_MARGIN if draft.drafter == self._asked_first else 1.0

    def _row_time(self, outlook: _Outlook) -> float:
        """The time that one more row adds to the pass, near the outlook's number of rows."""
        size = self._size
        num_rows = size + outlook.num_rows
        low, high = max(size, num_rows - size), num_rows + size
        below = self._times.step_time(size, low, sampled=self._sampled)
        above = self._times.step_time(size, high, sampled=self._sampled)
        assert below is not None
        assert above is not None
        return max((above - below) / (high - low), 0.0)
