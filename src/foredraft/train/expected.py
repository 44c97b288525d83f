"""Computes the expected τ of a text, without drawing a draft. On a text that the target wrote, acceptance is independent at every
position: under rejection sampling (arXiv:2211.17192) P(x and accepted) = min(p(x), q(x)). So the text's token x was drafted and
accepted with probability a = min(1, q(x) / p(x)), whatever came before it. Greedy decoding is the same with one-hot distributions.
After a rejection, x is drawn from the residual, and a new round begins after it. So the expected number of rounds follows from a
recursion over the positions. It is exact for a drafter that reads nothing but the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ForedraftError

_ROUNDING = 1e-6
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expectation:
    """Sums over texts, which can be added up. num_tokens: of the texts. num_rounds: the expected target passes for them.
    evaluated, accepted: [γ], the expected numbers of draft tokens evaluated and accepted at each position of the draft."""

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
        """Conditional acceptance α at each position of the draft; nan where none is evaluated."""
        with np.errstate(invalid="ignore"):
            rates: list[float] = (self.accepted / self.evaluated).tolist()
        return rates

    @classmethod
    def zero(cls, gamma: int) -> Expectation:
        """The sum over no texts."""
        return cls(0, 0.0, np.zeros(gamma), np.zeros(gamma))

    def __add__(self, other: Expectation) -> Expectation:
        return Expectation(
            self.num_tokens + other.num_tokens,
            self.num_rounds + other.num_rounds,
            self.evaluated + other.evaluated,
            self.accepted + other.accepted,
        )


def expect(acceptance: Sequence[float] | Floats, gamma: int, num_undrafted: int = 0) -> Expectation:
    """acceptance: [N], the probability of each token of a text, in order; or [places, N] if it depends on the token's position in
    its draft. gamma: draft tokens of a round; at the end of the text there are fewer, because the last token is always the target's
    own. num_undrafted: rounds that begin at one of this many first tokens have no draft. Raises ForedraftError for a probability outside
    0 to 1."""
    rates = np.atleast_2d(np.asarray(acceptance, dtype=np.float64))
    if not ((rates >= 0) & (rates <= 1 + _ROUNDING)).all():
        raise ForedraftError("acceptance must hold probabilities between 0 and 1")
    num_tokens = rates.shape[1]
    rates = rates[:gamma] if len(rates) > 1 else np.broadcast_to(rates, (gamma, num_tokens))
    starts = np.zeros(num_tokens + 1)  # the probability that a round begins at a position
    starts[0] = 1.0 if num_tokens else 0.0
    evaluated, accepted = np.zeros(gamma), np.zeros(gamma)
    for first in range(num_tokens):
        reach = float(starts[first])
        depth = 0 if first < num_undrafted else min(len(rates), num_tokens - first - 1)
        for position in range(depth):
            survival = reach * rates[position, first + position]
            evaluated[position] += reach
            accepted[position] += survival
            starts[first + position + 1] += reach - survival
            reach = survival
        starts[first + depth + 1] += reach
    return Expectation(num_tokens, float(starts[:num_tokens].sum()), evaluated, accepted)
