"""Counts of drafting and of prefix hits. They merge by addition; ratios are computed at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest


def _add_lists(a: list[int], b: list[int]) -> list[int]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    return [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]


def _count_first(counts: list[int], length: int) -> None:
    """Add one at each of the first `length` places."""
    counts += [0] * (length - len(counts))
    for place in range(length):
        counts[place] += 1


@dataclass(slots=True)
class SpeculationStats:
    """Results of verification, over any number of steps and sequences.

    num_steps: verifications (one per sequence and step), with or without a draft. num_spec_steps: those with a draft.
    num_draft_tokens: all draft tokens that were verified. num_accepted_tokens: accepted ones, without those cut off by a stop. Bonus
    and recovered tokens count in neither.
    num_evaluated_tokens: accepted plus first rejected; in a tree, siblings count as one. num_emitted_tokens: all tokens added to a text.
    acceptance_histogram[j]: drafted steps in which j draft tokens were accepted.
    drafted_per_position, evaluated_per_position, accepted_per_position: by position in the draft, from 0; in a tree, by depth.
    num_near_ties: emitted tokens whose `log p + noise` exceeds the second best by less than 1e-4 (float32 only, where rounding
    could reverse the order).
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_evaluated_tokens: int = 0
    num_emitted_tokens: int = 0
    num_near_ties: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    evaluated_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        merged = SpeculationStats()
        for name in self.__slots__:
            a, b = getattr(self, name), getattr(other, name)
            setattr(merged, name, _add_lists(a, b) if isinstance(a, list) else a + b)
        return merged

    def record(
        self,
        *,
        num_drafted: int,
        num_accepted: int,
        num_kept: int,
        near_ties: int = 0,
        depth: int | None = None,
        num_evaluated: int | None = None,
    ) -> None:
        """Count one verification. num_kept: how many of its num_accepted + 1 tokens the text kept. depth, num_evaluated: for a tree, see
        Outcome."""
        if depth is None or num_evaluated is None:
            depth, num_evaluated = num_drafted, min(num_accepted + 1, num_drafted)
        self.num_steps += 1
        self.num_emitted_tokens += num_kept
        self.num_near_ties += near_ties
        if num_drafted == 0:
            return
        accepted = min(num_accepted, num_kept)
        was_rejected = num_evaluated > num_accepted and num_kept > num_accepted
        evaluated = accepted + was_rejected
        self.num_spec_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += accepted
        self.num_evaluated_tokens += evaluated
        self.acceptance_histogram += [0] * (depth + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1
        _count_first(self.drafted_per_position, depth)
        _count_first(self.evaluated_per_position, evaluated)
        _count_first(self.accepted_per_position, accepted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """τ as in vLLM: 1 + accepted / drafted steps."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def conditional_acceptance(self) -> float | None:
        """α = accepted / evaluated."""
        return self.num_accepted_tokens / self.num_evaluated_tokens if self.num_evaluated_tokens else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """α at each position of the draft at which a token was evaluated."""
        accepted, evaluated = self.accepted_per_position, self.evaluated_per_position
        return [num / of for num, of in zip_longest(accepted, evaluated, fillvalue=0)]

    @property
    def tokens_per_pass(self) -> float | None:
        """Emitted tokens per verification, those without a draft included."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else None


@dataclass(slots=True)
class PrefixStats:
    """Hits of the prefix cache.

    num_asked_tokens: the tokens of the histories of all started sequences that may share prefixes, without the last token of each,
    which is always computed. num_found_tokens: how many of these had cached keys and values.
    """

    num_asked_tokens: int = 0
    num_found_tokens: int = 0

    def __add__(self, other: PrefixStats) -> PrefixStats:
        return PrefixStats(
            self.num_asked_tokens + other.num_asked_tokens, self.num_found_tokens + other.num_found_tokens
        )

    def record(self, num_asked: int, num_found: int) -> None:
        self.num_asked_tokens += num_asked
        self.num_found_tokens += num_found
