"""A test by betting: whoever wins much at fair odds shows that they are not fair.

The claim is that each token x of a text was drawn from a known law p, given what precedes it. A *bet* is a bounded
function g of the token whose mean under p is 0. Staking the share λ of a fortune on it multiplies that fortune by
1 + λ g(x), whose mean is 1 under the claim; so the fortune is a martingale, and by Ville's inequality the odds that it
ever reaches k times its beginning are at most 1/k: exactly, for every number of tokens, however dependent, and for
whatever reason one stops. (Ville 1939; Shafer, "Testing by betting", 2021; Waudby-Smith and Ramdas, arXiv:2010.09686.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""The odds that all bets together fail a text that keeps the claim, at most."""

_SHARES = (0.9, 0.5, 0.25, 0.12, 0.06, 0.03)
"""Of the largest stake that a bet allows, in both directions."""

_QUANTILE = 2.326
"""Of the normal law, for a power of 0.99."""


@dataclass(frozen=True, slots=True)
class Bet:
    """low <= g <= high for every token, with low < 0 < high. description: what the bet would notice."""

    description: str
    low: float = -1.0
    high: float = 1.0

    @property
    def stakes(self) -> list[float]:
        return [share / -self.low for share in _SHARES] + [-share / self.high for share in _SHARES]


SURPRISE = Bet("tokens are too likely or too unlikely on average")
_MOST_SURPRISE = 16.0


def surprise(p: Tensor) -> Tensor:
    """-log p, bounded and scaled to at most 1: what the bet SURPRISE is on, before its mean is taken off."""
    return (-p.clamp(min=1e-300).log()).clamp(max=_MOST_SURPRISE) / _MOST_SURPRISE


@dataclass(slots=True)
class _Account:
    """One bet's fortunes, as a logarithm for each stake. log_gain, log_gain_sq: sums over tokens of the logarithms and of
    their squares. variance, shift: sums of what `update` was given. peak: the largest mean fortune so far."""

    stakes: Tensor
    num_tokens: int = 0
    variance: float = 0.0
    shift: float = 0.0
    log_gain: Tensor = field(init=False)
    log_gain_sq: Tensor = field(init=False)
    peak: float = 0.0

    def __post_init__(self) -> None:
        self.log_gain, self.log_gain_sq = torch.zeros_like(self.stakes), torch.zeros_like(self.stakes)

    def update(self, g: Tensor, counts: Tensor, variance: float, shift: float) -> None:
        gains = torch.log1p(self.stakes * g[:, None])
        self.log_gain += counts @ gains
        self.log_gain_sq += counts @ gains.square()
        self.num_tokens += int(counts.sum())
        self.variance += variance
        self.shift += shift
        # an equal part of the first fortune goes on each stake
        self.peak = max(self.peak, float(self.log_gain.logsumexp(0)) - math.log(len(self.stakes)))

    def power(self, scale: float, limit: float) -> float:
        """The odds that the fortune passes exp(limit) on `scale` times as many tokens of the same kind."""
        n = self.num_tokens
        if n < 2:
            return 0.0
        mean = self.log_gain / n
        spread = (self.log_gain_sq / n - mean.square()).clamp(min=1e-12).sqrt()
        tokens = n * scale
        surplus = (tokens * mean - limit - math.log(len(self.stakes))) / (math.sqrt(tokens) * spread)
        return float(torch.special.ndtr(surplus.max()))


class Bets:
    """Several bets on the same tokens, each with a fortune of its own. Together they raise a false alarm with odds of at
    most FALSE_ALARM, because each of K must multiply its fortune by K / FALSE_ALARM.

    Fortunes are compared with the limit after each `update`, so updates come in the order of time.
    """

    def __init__(self, bets: Mapping[str, Bet]) -> None:
        self.bets = dict(bets)
        self.num_impossible = 0
        self._accounts = {
            name: _Account(torch.tensor(bet.stakes, dtype=torch.float64)) for name, bet in self.bets.items()
        }

    @property
    def limit(self) -> float:
        """The logarithm of the factor at which one fortune raises an alarm."""
        return math.log(len(self.bets) / FALSE_ALARM)

    @property
    def log_evidence(self) -> float:
        """-log10 of the odds of so much luck, corrected for the number of bets. Infinite once a token of probability 0
        came. A logarithm, because a gross fault wins more than a float holds."""
        if self.num_impossible:
            return math.inf
        best = max(account.peak for account in self._accounts.values())
        return max(0.0, (best - math.log(len(self.bets))) / math.log(10))

    @property
    def is_rejected(self) -> bool:
        return bool(self.num_impossible) or any(account.peak >= self.limit for account in self._accounts.values())

    def num_tokens(self, name: str) -> int:
        return self._accounts[name].num_tokens

    def update(
        self,
        name: str,
        g: Tensor,
        variance: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        counts: Tensor | None = None,
    ) -> None:
        """g: [N] float64, of N tokens. variance: [N], of g under the claim; shift: [N], its mean under the alternative:
        `smallest_share` needs both. counts: [N] float64, how many tokens gave this g; None: one each."""
        totals = (0.0 if part is None else float(part.sum()) for part in (variance, shift))
        self._accounts[name].update(g.cpu(), g.new_ones(len(g)).cpu() if counts is None else counts, *totals)

    def power_at(self, scale: float) -> float:
        """The odds of an alarm on `scale` times as many tokens, if they are like those so far."""
        if self.num_impossible:
            # so many in so few: it is missed with odds of e^-number
            return 1.0 - math.exp(-self.num_impossible * scale)
        return max(account.power(scale, self.limit) for account in self._accounts.values())

    def smallest_share(self, name: str) -> float | None:
        """The smallest share of tokens in which the alternative of this bet (see `shift`) could replace the claim and
        still raise an alarm with odds of 0.99. None where no share would do, and for a bet that is not placed.

        With stake λ a mean of δ adds λ δ - λ² σ²/2 per token to the logarithm, give or take λ σ; λ is the best one of
        those in play.
        """
        account = self._accounts.get(name)
        if account is None or account.num_tokens == 0 or account.shift <= 0:
            return None
        n = account.num_tokens
        sigma = math.sqrt(account.variance / n)
        needed = self.limit + math.log(len(account.stakes))
        biases = [
            needed / (n * stake) + stake * sigma * sigma / 2 + _QUANTILE * sigma / math.sqrt(n)
            for stake in account.stakes.tolist()
            if 0 < stake * self.bets[name].high <= 0.5
        ]
        share = min(biases) * n / account.shift
        return share if share <= 1.0 else None

    @property
    def summary(self) -> str:
        """One line."""
        if self.num_impossible:
            return f"{self.num_impossible} tokens have probability 0 under the target's law"
        won = (
            f"the best bet against the claim won {_power_of_ten(self.log_evidence)} to 1, "
            f"and {1 / FALSE_ALARM:,.0f} rejects"
        )
        best = max(self._accounts, key=lambda name: self._accounts[name].peak)
        return f"{self.bets[best].description}: {won}" if self.is_rejected else won

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "log10_evidence": finite(self.log_evidence),
            "log10_limit": -math.log10(FALSE_ALARM),
            "num_impossible": self.num_impossible,
        }


def finite(value: float) -> float | None:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else None


def _power_of_ten(log10: float) -> str:
    return f"{10**log10:,.1f}" if log10 < 9 else f"10^{log10:,.0f}"
