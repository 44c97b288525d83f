"""Plans the budgets of a batch of sequences, and caches them for batches in the same state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.token_tree import TreeShape
from foredraft.policy.acceptance import AcceptanceEstimator
from foredraft.policy.base import NO_DRAFTING, Cooldowns, DraftBudget, Hybrid
from foredraft.policy.cost_model import MIN_MISSED, CostModel
from foredraft.policy.plan import Candidate, best_plan
from foredraft.policy.sequence_state import SequenceStates
from foredraft.policy.tree_acceptance import TreeEstimator

_NUM_STEPS_OF_USE = 32
"""For how many steps a drafter that has read a text is expected to be used."""
_PLAN_STEPS = 1024
_MIN_NEW_DRAFTS, _MAX_NEW_DRAFTS, _NEW_DRAFT_SHARE = 4, 64, 1 / 8
"""A plan is reused for at most this many steps, and until this many more drafts were verified for each of its sequences: a share of all
so far, within bounds."""
_MAX_REMEMBERED = 4096
"""The most cached plans times sequences per plan: a plan takes about a quarter of a kilobyte for each sequence."""

_Key = tuple[int, bool, tuple[tuple[int, int], ...]]
"""Everything that a plan depends on in one sequence: the most it may draft, whether that is fixed, and for each drafter the acceptance
bucket and the magnitude of the number of tokens that it would have to read first."""


class BudgetPlanner:
    """Plans budgets. acceptance: by drafter; the first one serves requests with a number of draft tokens of their own. trees: by
    drafter, for those that may grow trees. max_draft: the most draft tokens of a step. shape: of drafts with a fixed number of
    tokens. hybrid: if one of the drafters is one."""

    def __init__(
        self,
        acceptance: Mapping[str, AcceptanceEstimator],
        trees: Mapping[str, TreeEstimator],
        costs: CostModel,
        states: SequenceStates,
        cooldowns: Cooldowns,
        max_draft: int,
        shape: TreeShape | None = None,
        hybrid: Hybrid | None = None,
    ) -> None:
        self._acceptance = acceptance
        self._trees = trees
        self._costs = costs
        self._states = states
        self._cooldowns = cooldowns
        self._max_draft = max_draft
        self._shape = shape
        self._hybrid = hybrid
        self._first = next(iter(acceptance))
        self._plans: dict[tuple[bool, tuple[_Key, ...]], tuple[int, int, list[DraftBudget]]] = {}
        self._num_drafts = 0

    def may_use(self, drafter: str) -> bool:
        """Whether a plan or a probe may use this drafter now."""
        hybrid = self._usable_hybrid()
        return drafter not in self._cooldowns and (hybrid is None or drafter != hybrid.model)

    def add_draft(self) -> None:
        """Count a verified draft."""
        self._num_drafts += 1

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()

    def fixed_budget(self, sequence: TokenSequence) -> DraftBudget:
        """The budget of a sequence with a number of draft tokens of its own."""
        wanted = min(sequence.speculative_tokens or 0, sequence.room - 1)
        return (
            DraftBudget(self._first, wanted, self._shape)
            if wanted > 0 and self._first not in self._cooldowns
            else NO_DRAFTING
        )

    def budgets(self, sequences: Sequence[TokenSequence], step: int, *, sampled: bool) -> list[DraftBudget]:
        """The budgets of the best plan. A recent plan for sequences in the same state is reused."""
        return self._budgets(tuple([self._key(sequence, step) for sequence in sequences]), step, sampled)

    def budget_among_equals(self, sequence: TokenSequence, size: int, step: int, *, sampled: bool) -> DraftBudget:
        """The budget of a sequence in a batch of this size if all the others are in the same state."""
        return self._budgets((self._key(sequence, step),) * size, step, sampled)[0]

    def _budgets(self, keys: tuple[_Key, ...], step: int, sampled: bool) -> list[DraftBudget]:
        key = sampled, keys
        plan = self._plans.get(key)
        if plan is not None and step <= plan[0] and self._num_drafts <= plan[1]:
            return plan[2]
        if len(self._plans) * len(keys) > _MAX_REMEMBERED:
            self._plans.clear()
        candidates = {each: self._candidate(each) for each in dict.fromkeys(keys)}
        hybrid = self._usable_hybrid()
        asked_first = None if hybrid is None else hybrid.lookup
        best = best_plan([candidates[each] for each in keys], self._costs, sampled=sampled, asked_first=asked_first)
        budgets = [NO_DRAFTING] * len(keys) if best is None else best.budgets
        num_new = min(max(int(_NEW_DRAFT_SHARE * self._num_drafts), _MIN_NEW_DRAFTS), _MAX_NEW_DRAFTS)
        self._plans[key] = step + _PLAN_STEPS, self._num_drafts + num_new * len(keys), budgets
        return budgets

    def _key(self, sequence: TokenSequence, step: int) -> _Key:
        length = len(sequence.tokens)
        histories = self._states.of(sequence).histories.values()
        is_fixed = sequence.speculative_tokens is not None
        most = self.fixed_budget(sequence).max_draft if is_fixed else max(sequence.room - 1, 0)
        buckets = tuple([(history.bucket(step), _magnitude(length - history.num_read)) for history in histories])
        return min(self._max_draft, most), is_fixed, buckets

    def _candidate(self, key: _Key) -> Candidate:
        max_draft, is_fixed, buckets = key
        if is_fixed:
            forecast = self._acceptance[self._first].forecast(buckets[0][0])
            fixed = DraftBudget(self._first, max_draft) if max_draft else NO_DRAFTING
            return Candidate(0, {self._first: forecast}, fixed=fixed)
        forecasts, trees, start_times = {}, {}, {}
        for (name, acceptance), (bucket, magnitude) in zip(self._acceptance.items(), buckets, strict=True):
            if self.may_use(name):
                forecasts[name] = acceptance.forecast(bucket)
                if name in self._trees:
                    trees[name] = self._trees[name].forecasts(bucket)
                start_times[name] = self._costs.reading_time(name, _num_tokens(magnitude)) / _NUM_STEPS_OF_USE
        return Candidate(max_draft, forecasts, start_times, trees=trees)

    def _usable_hybrid(self) -> Hybrid | None:
        return self._hybrid if self._hybrid is not None and self._hybrid.name not in self._cooldowns else None


def _magnitude(num_tokens: int) -> int:
    """0 below MIN_MISSED = 32 tokens; 1 up to 127, 2 up to 511, and so on."""
    return ((num_tokens // MIN_MISSED).bit_length() + 1) // 2


def _num_tokens(magnitude: int) -> int:
    """A typical number of tokens with this magnitude."""
    return 16 << 2 * magnitude if magnitude else 0
