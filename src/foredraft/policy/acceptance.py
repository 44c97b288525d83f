"""How likely each draft token is to stand, by its place in the draft and by how the text went of late.

The rate at place j is the share of drafts that reached place j - 1 whole and of which token j was there and stood. A lookup
that found nothing counts as a token that did not stand: what is asked for is what is paid for.

A text has a mood: new, long not asked for, or the level of its recent acceptance. Rates are counted over all texts of the
process in that mood. So a forecast is calibrated by what came of it before: how soon a text that went badly goes well again
is not assumed but counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

NEW, STALE, _FIRST_LEVEL = 0, 1, 2
_LEVELS = (0.1, 0.35, 0.6, 0.85)
_LEVEL_RATES = tuple((low + high) / 2 for low, high in pairwise((0.0, *_LEVELS, 1.0)))
NUM_MOODS = _FIRST_LEVEL + len(_LEVELS) + 1

_OPTIMISM = 0.85
"""Of a drafter that nothing is known of. What is not tried is not found out, and a few drafts are soon paid for."""
_FADING = 0.5 ** (1 / 200)
_MOST_WEIGHT = 1e9
_PRIOR = 6.0
_STALE_AFTER = 16
_SCORE_RATE, _FIRST_SCORE_RATE = 0.3, 0.5
"""How much of a text's score is what came of its last draft; of its first, where the rest is what texts usually come to, and of the
first after a long time, where it is old. One draft is little to judge a text by: two in five of good texts begin with a token that
does not stand."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What drafts of 0, 1, 2, ... tokens are expected to bring. num_tokens[g]: tokens emitted, the target's own
    included, where g are asked for. num_rows[g]: draft tokens that will have to be verified."""

    num_tokens: list[float]
    num_rows: list[float]


@dataclass(slots=True)
class TextRecord:
    """One text under one drafter. score: the share of its evaluated draft tokens that stood, the last ones counting most;
    None before the first. asked_at: the round of the last draft. num_read: how much of the text the drafter has seen."""

    score: float | None = None
    asked_at: int = 0
    num_read: int = 0

    def mood(self, now: int) -> int:
        if self.score is None:
            return NEW
        if now - self.asked_at > _STALE_AFTER:
            return STALE
        return _FIRST_LEVEL + bisect_right(_LEVELS, self.score)

    def record(self, num_asked: int, num_accepted: int, now: int, usual: float) -> None:
        """usual: Acceptance.usual before this draft."""
        stood = num_accepted / min(num_asked, num_accepted + 1)
        before = usual if self.score is None else self.score
        rate = _FIRST_SCORE_RATE if self.mood(now) in (NEW, STALE) else _SCORE_RATE
        self.score = before + rate * (stood - before)
        self.asked_at = now


@dataclass(slots=True)
class _PlaceCounts:
    """By place in the draft, fading. reached, stood: drafts that came to that place, and of which the token there stood.
    offered, drafted: drafts asked for that many tokens, and that had that many (not cumulated).

    Instead of all counts fading at every draft, the next draft weighs more: a count is worth its share of weight.
    """

    reached: list[float]
    stood: list[float]
    offered: list[float]
    drafted: list[float]
    weight: float = 1.0
    forecast: Forecast | None = field(default=None)

    @classmethod
    def of(cls, max_draft: int) -> _PlaceCounts:
        return cls([0.0] * max_draft, [0.0] * max_draft, [0.0] * max_draft, [0.0] * max_draft)

    def record(self, num_asked: int, num_drafted: int, num_accepted: int) -> None:
        self.weight /= _FADING
        if self.weight > _MOST_WEIGHT:
            self._rescale()
        weight = self.weight
        self.offered[num_asked - 1] += weight
        if num_drafted:
            self.drafted[num_drafted - 1] += weight
        for place in range(min(num_accepted + 1, num_asked)):
            self.reached[place] += weight
        for place in range(num_accepted):
            self.stood[place] += weight
        self.forecast = None

    def _rescale(self) -> None:
        for counts in (self.reached, self.stood, self.offered, self.drafted):
            counts[:] = [count / self.weight for count in counts]
        self.weight = 1.0

    def rates(self, prior: Sequence[float]) -> list[float]:
        """prior: what is thought of each place before anything was counted there."""
        return [
            self._blended(stood, reached, before)
            for stood, reached, before in zip(self.stood, self.reached, prior, strict=True)
        ]

    def chained_rates(self, first: float) -> list[float]:
        """first: what is thought of the first place; each of the others is thought to be like the one before it."""
        found: list[float] = []
        for stood, reached in zip(self.stood, self.reached, strict=True):
            found.append(self._blended(stood, reached, found[-1] if found else first))
        return found

    def share(self, prior: float) -> float:
        """Of all places together. prior: what is thought of it before anything was counted."""
        return self._blended(sum(self.stood), sum(self.reached), prior)

    def found(self, prior: list[float]) -> list[float]:
        """The share of asks for so many tokens that brought so many."""
        shares, offered, drafted = list(prior), 0.0, 0.0
        for place in range(len(shares) - 1, -1, -1):
            offered += self.offered[place]
            drafted += self.drafted[place]
            shares[place] = min(self._blended(drafted, offered, prior[place]), 1.0)
        return shares

    def _blended(self, count: float, chances: float, before: float) -> float:
        """The share counted; where little was counted, about what was thought before."""
        prior = _PRIOR * self.weight
        return (count + prior * before) / (chances + prior)


class Acceptance:
    """One drafter's rates, by mood. max_draft: the longest draft."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft
        self._all = _PlaceCounts.of(max_draft)
        self._moods = [_PlaceCounts.of(max_draft) for _ in range(NUM_MOODS)]

    def record(self, mood: int, num_asked: int, num_drafted: int, num_accepted: int) -> None:
        """One draft of a text in this mood. What goes beyond max_draft is not counted."""
        asked, drafted, accepted = (min(count, self.max_draft) for count in (num_asked, num_drafted, num_accepted))
        self._all.record(asked, drafted, accepted)
        self._moods[mood].record(asked, drafted, accepted)

    @property
    def usual(self) -> float:
        """The share of evaluated draft tokens that stood, over all texts."""
        return self._all.share(_OPTIMISM)

    def forecast(self, mood: int) -> Forecast:
        counts = self._moods[mood]
        if counts.forecast is None:
            counts.forecast = self._computed(counts, self._rates(mood))
        return counts.forecast

    def _rates(self, mood: int) -> list[float]:
        """Of a mood that was seldom seen a level says itself what to think; any other is thought to be like all together."""
        if mood >= _FIRST_LEVEL:
            return self._moods[mood].chained_rates(_LEVEL_RATES[mood - _FIRST_LEVEL])
        return self._moods[mood].rates(self._all.chained_rates(_OPTIMISM))

    def _computed(self, counts: _PlaceCounts, rates: Sequence[float]) -> Forecast:
        found = counts.found(self._all.found([1.0] * self.max_draft))
        num_tokens, num_rows, survival = [1.0], [0.0], 1.0
        for place, rate in enumerate(rates):
            survival *= rate
            num_tokens.append(num_tokens[-1] + survival)
            num_rows.append(num_rows[-1] + max(found[place], survival))
        return Forecast(num_tokens, num_rows)
