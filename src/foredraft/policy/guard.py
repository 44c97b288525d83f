"""Hard thresholds that a user sets, around any policy."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from foredraft.engine.proposal import Drafter
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.policy.base import DraftBudget, Policy
from foredraft.utils.arguments import check_thresholds

logger = logging.getLogger("foredraft")

LOW_ACCEPTANCE, MUCH_MEMORY = "min_acceptance_rate", "max_draft_memory"
WINDOW = 256
COOLDOWN = 512


class Guard:
    """What the policy within decides, told to leave a drafter that crossed a threshold alone for num_steps steps: it asks
    another one, if it has one, or decodes plainly. Then the drafter is tried again, and judged anew.

    drafters: by the names that the policy knows them by. min_acceptance_rate: accepted / drafted, over a drafter's last
    `window` verified draft tokens; nobody is judged by fewer. max_draft_memory: bytes of the cache memory that one
    drafter may hold; one that holds more gives up all of it. Both are looked at after a step, so a step may end above.

    crossings: how often, by drafter and by threshold. Such counts merge by addition.

    Raises ForedraftError for a threshold that could not be meant.
    """

    def __init__(
        self,
        policy: Policy,
        drafters: Mapping[str, Drafter],
        *,
        min_acceptance_rate: float | None = None,
        max_draft_memory: int | None = None,
        window: int = WINDOW,
        num_steps: int = COOLDOWN,
    ) -> None:
        check_thresholds(min_acceptance_rate, max_draft_memory)
        self.policy = policy
        self.crossings: Counter[tuple[str, str]] = Counter()
        self.drafters = dict(drafters)
        self._least_rate = min_acceptance_rate
        self._most_memory = max_draft_memory
        self._windows = {name: _Window(window) for name in drafters}
        self._num_steps = num_steps
        self._running: list[int] = []

    @property
    def fallbacks(self) -> Counter[tuple[str, str]]:
        return self.policy.fallbacks

    def begin(self, running: Sequence[TokenSequence]) -> None:
        self._running = [sequence.seq_id for sequence in running]
        self.policy.begin(running)

    def draft_budget(self, sequence: TokenSequence) -> DraftBudget:
        return self.policy.draft_budget(sequence)

    def observe(self, step: Step) -> None:
        self.policy.observe(step)
        for name in step.draft_times:
            if self._least_rate is not None:
                self._judge_acceptance(name, self._least_rate, step)
            if self._most_memory is not None:
                self._judge_memory(name, self._most_memory, step)

    def cool_down(self, drafters: Sequence[str], reason: str, num_steps: int) -> list[str]:
        return self.policy.cool_down(drafters, reason, num_steps)

    def cooldowns(self) -> dict[str, str]:
        return self.policy.cooldowns()

    def _judge_acceptance(self, name: str, least: float, step: Step) -> None:
        window = self._windows[name]
        for item, outcome, num_kept in zip(step.scoring, step.outcomes, step.num_kept, strict=True):
            if item.drafter == name and outcome.num_drafted:
                window.add(outcome.num_drafted, min(outcome.num_accepted, num_kept))
        if window.is_full and window.rate < least:
            self._cross(
                name,
                LOW_ACCEPTANCE,
                f"{window.rate:.1%} of its last {window.num_drafted} draft tokens stood",
                f"{least:.1%}",
                step,
            )
            window.clear()

    def _judge_memory(self, name: str, most: int, step: Step) -> None:
        held = getattr(self.drafters[name], "bytes_held", 0)
        if held > most:
            measured = f"it held {_mebibytes(held)} of cache memory, given up now"
            self._cross(name, MUCH_MEMORY, measured, _mebibytes(most), step)

    def _cross(self, name: str, threshold: str, measured: str, limit: str, step: Step) -> None:
        """Whoever rests holds nothing."""
        self.drafters[name].forget([*{*self._running, *(item.sequence.seq_id for item in step.scheduled)}])
        self.crossings[name, threshold] += 1
        self.policy.cool_down([name], threshold, self._num_steps)
        logger.warning(
            "%s: %s (%s is %s): it is not asked for the next %d steps",
            name,
            measured,
            threshold,
            limit,
            self._num_steps,
        )


class _Window:
    """The last drafts that together have at least so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._drafts: deque[tuple[int, int]] = deque()
        self.num_drafted = self._num_accepted = 0

    @property
    def is_full(self) -> bool:
        return self.num_drafted >= self._num_tokens

    @property
    def rate(self) -> float:
        return self._num_accepted / self.num_drafted

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self._drafts.append((num_drafted, num_accepted))
        self.num_drafted += num_drafted
        self._num_accepted += num_accepted
        while self.num_drafted - self._drafts[0][0] >= self._num_tokens:
            oldest_drafted, oldest_accepted = self._drafts.popleft()
            self.num_drafted -= oldest_drafted
            self._num_accepted -= oldest_accepted

    def clear(self) -> None:
        self._drafts.clear()
        self.num_drafted = self._num_accepted = 0


def _mebibytes(amount: int) -> str:
    return f"{amount / 2**20:.1f} MiB"
