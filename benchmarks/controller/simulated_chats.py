"""How close "auto" comes to the best fixed draft, on simulated chats and simulated times.

    python -m benchmarks.controller.simulated_chats [--texts 24] [--seeds 16]

A text of 128 tokens alternates, 16 tokens at a time, between passages that `suffix` can copy and passages that it cannot. A head is
right equally often in both, and the merged drafter is as good as the better of the two. Rates and times are about those of SmolLM2
with its head. Each system writes the same texts one after another, and its controller learns from one text to the next.

Four machines: one without noise; one on which every time is random (`jitter`); one whose speed changes every few seconds (`drift`); and
both. The rates are computed with the undisturbed times of the same steps, so they show what was chosen and not how fast the machine was
at the time. Medians over seeds, relative to the fixed tree. It takes four minutes and uses no model.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from statistics import median

from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import ScheduledSequence
from foredraft.engine.token_tree import TreeShape
from foredraft.policy import Controller, DraftBudget, FixedPolicy, Policy
from tests.policy.simulator import FakeDrafter, Simulator, no_time, text

PROMPT, ROOM, PASSAGE, COPIED = 60, 128, 16, 0.25
HEAD_RATE, SIBLINGS = 0.45, (0.33, 0.2, 0.15)
PASS_SECONDS, LONGEST = 0.005, 8
NAMES = ("suffix", "eagle", "merged")
MACHINES = {"without noise": (0.02, 0.0), "jitter": (0.15, 0.0), "drift": (0.02, 0.4), "both": (0.15, 0.4)}
"""The spread of single times, and the largest logarithm of a change of speed."""
DRIFT_SECONDS = 5.0


class Machine:
    """Disturbs times. undisturbed: the sum of the times that it was given."""

    def __init__(self, seed: int, jitter: float, drift: float) -> None:
        self._chance = Random(seed)
        self._jitter, self._drift = jitter, drift
        self._now = self._until = 0.0
        self._factor = 1.0
        self.undisturbed = 0.0

    def disturbed(self, seconds: float) -> float:
        self.undisturbed += seconds
        if self._now >= self._until:
            self._factor = math.exp(self._chance.uniform(0, self._drift))
            self._until = self._now + self._chance.expovariate(1 / DRIFT_SECONDS)
        found = seconds * self._factor * math.exp(self._chance.gauss(0, self._jitter))
        self._now += found
        return found


class Chats(Simulator):
    """A simulator in which what a drafter gets right depends on the passage."""

    def __init__(self, policy: Policy, machine: Machine, seed: int) -> None:
        drafters = {
            "suffix": FakeDrafter(lambda num_requests, depth: 0.00005, lambda seq_id: 0.0),
            "eagle": FakeDrafter(lambda num_requests, depth: 0.0002 + 0.00045 * depth, lambda seq_id: 0.0),
            "merged": FakeDrafter(lambda num_requests, depth: 0.0003 + 0.00045 * depth, lambda seq_id: 0.0),
        }
        super().__init__(policy, drafters, pass_seconds, seed=seed)
        self._machine = machine

    def _jittered(self, seconds: float) -> float:
        return self._machine.disturbed(seconds)

    def _num_drafted(self, item: ScheduledSequence) -> int:
        if item.drafter:
            drafter, copied = self.drafters[item.drafter], is_copied(item.sequence)
            rate, drafter.siblings = rates_of(item.drafter, is_copied=copied)
            drafter.acceptance = lambda seq_id: rate
            drafter.finds = 1.0 if item.drafter != "suffix" else 0.95 if copied else 0.25
        return super()._num_drafted(item)


def is_copied(sequence: TokenSequence) -> bool:
    return Random(f"{sequence.seq_id} {len(sequence.tokens) // PASSAGE}").random() < COPIED


def rates_of(drafter: str, *, is_copied: bool) -> tuple[float, tuple[float, ...]]:
    """The acceptance rates of a first child and of its siblings."""
    if drafter == "suffix":
        return (0.85 if is_copied else 0.3), (0.2, 0.1)
    return (0.87 if is_copied and drafter == "merged" else HEAD_RATE), SIBLINGS


def pass_seconds(num_rows: int) -> float:
    """Five rows cost 12 % more than one, and each further row another 6 %."""
    return PASS_SECONDS * (1 + 0.03 * (min(num_rows, 5) - 1) + 0.06 * max(num_rows - 5, 0))


@dataclass(frozen=True)
class System:
    """make: its policy. wanted: the number of draft tokens if that is fixed."""

    make: Callable[[], Policy]
    wanted: int | None = None

    @classmethod
    def auto(cls, names: tuple[str, ...] = NAMES, *, trees: bool = True, knows_parts: bool = True) -> System:
        """knows_parts: whether the controller knows which drafters are merged."""
        tree_drafters = names if trees else ()
        merged = {"merged": [name for name in names if name != "merged"]} if knows_parts else {}

        def make() -> Controller:
            return Controller(names, max_draft=LONGEST, tree_drafters=tree_drafters, merged=merged, clock=no_time)

        return cls(make)

    @classmethod
    def fixed(cls, drafter: str, parents: tuple[int, ...] = ()) -> System:
        """parents: of the tree; none: plain decoding."""
        return cls(lambda: FixedPolicy(drafter, TreeShape(parents) if parents else None), len(parents))

    def run(self, num_texts: int, seed: int, jitter: float, drift: float) -> tuple[float, Counter[str]]:
        """-> tokens per undisturbed second, and how many steps had which kind of draft"""
        machine = Machine(seed, jitter, drift)
        chats = Chats(self.make(), machine, seed)
        for number in range(num_texts):
            one = text(1000 * seed + number, prompt_len=PROMPT, room=ROOM, wanted=self.wanted)
            chats.add(one)
            while not one.is_finished:
                chats.step()
        kinds = Counter(kind_of(budget) for one_round in chats.rounds for budget in one_round.budgets.values())
        return sum(one_round.num_tokens for one_round in chats.rounds) / machine.undisturbed, kinds


def kind_of(budget: DraftBudget) -> str:
    if not budget.max_draft:
        return "no draft"
    is_chain = budget.shape is None or budget.shape.depth == len(budget.shape)
    return f"{budget.drafter} {'chain' if is_chain else 'tree'}"


SYSTEMS = {
    "plain decoding": System.fixed("suffix"),
    '"auto", chains': System.auto(trees=False),
    '"auto", trees': System.auto(),
    '"auto", trees, all drafters alike': System.auto(knows_parts=False),
    '"auto", trees, the merged drafter alone': System.auto(("merged",)),
    "a fixed chain of three, merged": System.fixed("merged", (-1, 0, 1)),
    "a fixed tree of 2 and 2, merged": System.fixed("merged", (-1, -1, 0, 0)),
}
BEST = "a fixed tree of 2 and 2, merged"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=16)
    args = parser.parse_args()
    print(f"| system | {' | '.join(MACHINES)} | drafts, both |\n|---|{'---|' * len(MACHINES)}---|")
    found = {
        name: [[system.run(args.texts, seed, *noise) for seed in range(args.seeds)] for noise in MACHINES.values()]
        for name, system in SYSTEMS.items()
    }
    for name, by_machine in found.items():
        ratios = [
            median(rate / of_best for (rate, _), (of_best, _) in zip(runs, best, strict=True))
            for runs, best in zip(by_machine, found[BEST], strict=True)
        ]
        kinds = sum((kinds for _, kinds in by_machine[-1]), Counter[str]())
        shares = ", ".join(f"{kind} {count / kinds.total():.2f}" for kind, count in kinds.most_common(4))
        print(f"| {name} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} | {shares} |")


if __name__ == "__main__":
    main()
