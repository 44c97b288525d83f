"""An engine without models: texts, times and outcomes are simulated, and a policy decides as in the real engine.

A drafter here is a cost and an acceptance rate. Time is simulated too, so nothing depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from foredraft.engine.proposal import Proposal
from foredraft.engine.scheduler import MEMORY_COOLDOWN
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Outcome, ScheduledSequence, Step
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.policy import MEMORY_SHORT, DraftBudget, Policy
from tests.laws import sampler_for

GREEDY = {"temperature": 0.0}


def no_time() -> float:
    """A controller's clock that stands still. A real one would time planning on this machine, while all other times are simulated."""
    return 0.0


def text(
    seq_id: int = 0,
    *,
    prompt_len: int = 4,
    room: int = 100_000,
    wanted: int | None = None,
    params: Mapping[str, Any] = GREEDY,
) -> TokenSequence:
    """A text. wanted: its own number of draft tokens; None leaves that to the policy. params: greedy unless they are given."""
    tokens = [1] * prompt_len
    sampler = sampler_for(params, prompt=tokens)
    return TokenSequence(seq_id, tokens, sampler, max_len=prompt_len + room, speculative_tokens=wanted)


@dataclass
class FakeDrafter:
    """seconds: the time of drafting, by the number of requests and the largest depth. acceptance: by seq_id, the probability that a
    draft token is accepted if those before it were. siblings: in a tree, the probability that the second child and the next ones are
    accepted if those before them were rejected. finds: the probability that a lookup finds anything. reading: seconds per token that
    was added while the drafter was not used."""

    seconds: Callable[[int, int], float]
    acceptance: Callable[[int], float]
    siblings: Sequence[float] = ()
    finds: float = 1.0
    reading: float = 0.0
    num_read: dict[int, int] = field(default_factory=dict)

    def missed(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens) - self.num_read.get(sequence.seq_id, 0)


@dataclass(frozen=True)
class Round:
    """A simulated step: the budget of each text by seq_id, the time taken and the number of emitted tokens."""

    budgets: dict[int, DraftBudget]
    seconds: float
    num_tokens: int

    @property
    def num_requested(self) -> int:
        return sum(budget.max_draft for budget in self.budgets.values())


class Simulator:
    """pass_seconds: the time of the target's pass, by its rows. token_ids: draws the values of all tokens, on which no policy may
    depend. jitter: the relative spread of the times."""

    def __init__(
        self,
        policy: Policy,
        drafters: dict[str, FakeDrafter],
        pass_seconds: Callable[[int], float],
        *,
        seed: int = 0,
        token_ids: Random | None = None,
        jitter: float = 0.02,
    ) -> None:
        self.policy = policy
        self.drafters = drafters
        self.running: list[TokenSequence] = []
        self.waiting: list[TokenSequence] = []
        self.rounds: list[Round] = []
        self._pass_seconds = pass_seconds
        self._chance = Random(seed)
        self._noise = Random(seed + 1)
        self._token_ids = token_ids or Random(seed + 2)
        self._jitter = jitter
        self._num_read: dict[int, int] = {}

    def add(self, *sequences: TokenSequence) -> None:
        self.waiting += sequences

    def abort(self, sequence: TokenSequence) -> None:
        """Abort a text as the engine does: without telling the policy."""
        self._forget(sequence)
        sequence.finish("abort")
        (self.running if sequence in self.running else self.waiting).remove(sequence)

    def give_up(self, names: Sequence[str]) -> None:
        """Make drafters drop their state, as the scheduler does when memory is short."""
        for name in names:
            self.drafters[name].num_read.clear()
        self.policy.cool_down(names, MEMORY_SHORT, MEMORY_COOLDOWN)

    def run(self, num_rounds: int) -> list[Round]:
        """Run num_rounds steps and return them."""
        for _ in range(num_rounds):
            self.step()
        return self.rounds[-num_rounds:]

    def step(self) -> None:
        self.policy.begin(self.running)
        scheduled = [self._schedule(sequence) for sequence in self.running]
        scheduled += [self._schedule(sequence) for sequence in self.waiting]
        self.running, self.waiting = self.running + self.waiting, []
        draft_times = {name: self._draft(name, scheduled) for name in {i.drafter for i in scheduled if i.max_draft}}
        num_drafted = [self._num_drafted(item) for item in scheduled]
        num_rows = sum(item.num_unread for item in scheduled) + sum(num_drafted)
        read_time = self._jittered(self._pass_seconds(num_rows))
        outcomes = [self._verify(item, drafted) for item, drafted in zip(scheduled, num_drafted, strict=True)]
        for item in scheduled:
            if item.max_draft:
                # a drafter has read the text as it was when it drafted, and its own draft
                self.drafters[item.drafter].num_read[item.sequence.seq_id] = len(item.sequence.tokens)
        num_kept = []
        for item, outcome in zip(scheduled, outcomes, strict=True):
            num_kept.append(item.sequence.commit(outcome.new_ids, outcome.num_drafted))
            self._num_read[item.sequence.seq_id] = len(item.sequence.tokens) - 1
            if item.max_draft:
                self.drafters[item.drafter].num_read[item.sequence.seq_id] = len(item.sequence.tokens)
        total = read_time + sum(draft_times.values())
        proposal = Proposal.certain([self._ids(drafted) for drafted in num_drafted])
        step = Step(scheduled, scheduled, proposal, outcomes, draft_times, read_time, 0.0, num_kept, total)
        for sequence in [s for s in self.running if s.is_finished]:
            self.running.remove(sequence)
            self._forget(sequence)
        self.policy.observe(step)
        budgets = {item.sequence.seq_id: DraftBudget(item.drafter, item.max_draft, item.shape) for item in scheduled}
        self.rounds.append(Round(budgets, total, sum(num_kept)))

    def _schedule(self, sequence: TokenSequence) -> ScheduledSequence:
        num_unread = len(sequence.tokens) - self._num_read.get(sequence.seq_id, 0)
        budget = self.policy.draft_budget(sequence)
        assert 0 <= budget.max_draft <= max(sequence.room - 1, 0), "more than could ever be emitted"
        shape = None if budget.shape is None else budget.shape.cut(budget.max_draft)
        return ScheduledSequence(sequence, num_unread, True, budget.max_draft, budget.drafter, shape=shape)

    def _draft(self, name: str, scheduled: Sequence[ScheduledSequence]) -> float:
        drafting = [item for item in scheduled if item.drafter == name and item.max_draft]
        drafter = self.drafters[name]
        depth = max(item.max_draft if item.shape is None else item.shape.depth for item in drafting)
        seconds = drafter.seconds(len(drafting), depth)
        return self._jittered(seconds + drafter.reading * sum(drafter.missed(item.sequence) for item in drafting))

    def _num_drafted(self, item: ScheduledSequence) -> int:
        if not item.max_draft:
            return 0
        return item.max_draft if self._chance.random() < self.drafters[item.drafter].finds else 0

    def _verify(self, item: ScheduledSequence, num_drafted: int) -> Outcome:
        shape = item.shape or TreeShape.chain(item.max_draft)
        path: list[int] = []
        if num_drafted:
            drafter, node = self.drafters[item.drafter], ROOT
            rates = [drafter.acceptance(item.sequence.seq_id), *drafter.siblings]
            while node in shape.children:
                standing = (
                    child for child, rate in zip(shape.children[node], rates, strict=False) if self._happens(rate)
                )
                node = next(standing, len(shape))
                path += [node] if node < len(shape) else []
        parents = None if item.shape is None else shape.parents[:num_drafted]
        return Outcome([0] * num_drafted, parents, path, self._ids(len(path) + 1), torch.empty(0, 0), [])

    def _happens(self, rate: float) -> bool:
        return self._chance.random() < rate

    def _ids(self, count: int) -> list[int]:
        return [self._token_ids.randrange(2, 1000) for _ in range(count)]

    def _jittered(self, seconds: float) -> float:
        return seconds * self._noise.uniform(1 - self._jitter, 1 + self._jitter)

    def _forget(self, sequence: TokenSequence) -> None:
        self._num_read.pop(sequence.seq_id, None)
        for drafter in self.drafters.values():
            drafter.num_read.pop(sequence.seq_id, None)


def tokens_per_second(rounds: Sequence[Round]) -> float:
    return sum(one.num_tokens for one in rounds) / sum(one.seconds for one in rounds)


def draft_share(rounds: Sequence[Round]) -> float:
    """The share of steps in which anything was drafted."""
    return sum(one.num_requested > 0 for one in rounds) / len(rounds)
