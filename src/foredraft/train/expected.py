"""τ without a draw. On a text that the target wrote, whether a draft token stands is a coin of its own at every place: under
rejection sampling (arXiv:2211.17192) P(x and accepted) = min(p(x), q(x)), so given the token x that the text got there, it
was drafted and accepted with probability a = min(1, q(x) / p(x)), whatever came before it in the text. Greedy decoding is the
same with one-hot laws. A rejected draft token leaves x too, drawn from the residual, and a round begins behind it. So the
expected number of rounds of a text is a recursion over its places, exact for a drafter that reads nothing but the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expectation:
    """Sums over texts, to be added up. num_tokens: of the texts. num_rounds: the target passes that are expected for them.
    evaluated, accepted: [γ] draft tokens that are verified at each place of the draft, and that stand."""

    num_tokens: int
    num_rounds: float
    evaluated: Floats
    accepted: Floats

    @property
    def tau(self) -> float:
        """Tokens per target pass."""
        return self.num_tokens / self.num_rounds if self.num_rounds else float("nan")

    @property
    def by_position(self) -> list[float]:
        """Conditional acceptance α at each place of the draft; nan where none is verified."""
        with np.errstate(invalid="ignore"):
            found: list[float] = (self.accepted / self.evaluated).tolist()
        return found

    def __add__(self, other: Expectation) -> Expectation:
        return Expectation(
            self.num_tokens + other.num_tokens,
            self.num_rounds + other.num_rounds,
            self.evaluated + other.evaluated,
            self.accepted + other.accepted,
        )


def expect(acceptance: Sequence[float], gamma: int) -> Expectation:
    """acceptance: of each token of a text, in order. gamma: draft tokens of a round; the engine drafts one less than is left
    of the text, since the last token is the target's in any case."""
    num = len(acceptance)
    starts = np.zeros(num + 1)  # the probability that a round begins here
    starts[0] = 1.0 if num else 0.0
    evaluated, accepted = np.zeros(gamma), np.zeros(gamma)
    for first in range(num):
        reach = float(starts[first])
        depth = min(gamma, num - first - 1)
        for place in range(depth):
            stands = reach * acceptance[first + place]
            evaluated[place] += reach
            accepted[place] += stands
            starts[first + place + 1] += reach - stands
            reach = stands
        starts[first + depth + 1] += reach
    return Expectation(num, float(starts[:num].sum()), evaluated, accepted)


def nothing(gamma: int) -> Expectation:
    """The sum of no texts."""
    return Expectation(0, 0.0, np.zeros(gamma), np.zeros(gamma))
