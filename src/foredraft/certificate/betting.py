"""A test by betting: who wins much against fair odds has seen that they are not fair.

The claim is that each token x of a text was drawn from a known law p, given what precedes it. A *bet* is a bounded
function g of the token whose mean under p is 0. Staking the share λ of a fortune on it multiplies that fortune by
1 + λ g(x), whose mean is 1 under the claim; so the fortune is a martingale, and by Ville's inequality it ever reaches k
times its beginning with odds of at most 1/k: exactly, for every number of tokens, however dependent, and for whatever
reason one stops. (Ville 1939; Shafer, "Testing by betting", 2021; Waudby-Smith and Ramdas, arXiv:2010.09686.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""The odds that all bets together fail a text that keeps the claim."""

_SHARES = (0.9, 0.5, 0.25, 0.12, 0.06, 0.03)
"""Of what a bet may stake at most, both ways."""

_QUANTILE = 2.326
"""Of the normal law, for a power of 0.99."""


@dataclass(frozen=True, slots=True)
class Bet:
    """low <= g <= high for every token, with low < 0 < high. says: what it would notice."""

    says: str
    low: float = -1.0
    high: float = 1.0

    @property
    def stakes(self) -> list[float]:
        return [share / -self.low for share in _SHARES] + [-share / self.high for share in _SHARES]


@dataclass(slots=True)
class _Account:
    """One bet's fortunes, a logarithm for each stake. log_gain, log_gain_sq: sums of the logarithms of single tokens.
    variance, shift: sums of what settle was given."""

    stakes: Tensor
    num_tokens: int = 0
    variance: float = 0.0
    shift: float = 0.0
    log_gain: Tensor = field(init=False)
    log_gain_sq: Tensor = field(init=False)
    peak: float = 0.0

    def __post_init__(self) -> None:
        self.log_gain, self.log_gain_sq = torch.zeros_like(self.stakes), torch.zeros_like(self.stakes)

    def settle(self, g: Tensor, times: Tensor, variance: float, shift: float) -> None:
        gains = torch.log1p(self.stakes * g[:, None])
        self.log_gain += times @ gains
        self.log_gain_sq += times @ gains.square()
        self.num_tokens += int(times.sum())
        self.variance += variance
        self.shift += shift
        # an equal part of the first fortune goes on each stake
        self.peak = max(self.peak, float(self.log_gain.logsumexp(0)) - math.log(len(self.stakes)))


class Bets:
    """Several bets on the same tokens, each with a fortune of its own; together they alarm with odds of at most
    FALSE_ALARM, because each of K must multiply its fortune by K / FALSE_ALARM.

    Fortunes are looked at after each call of settle, so calls come in the order of time.
    """

    def __init__(self, bets: Mapping[str, Bet]) -> None:
        self.bets = dict(bets)
        self.num_impossible = 0
        self._accounts = {
            name: _Account(torch.tensor(bet.stakes, dtype=torch.float64)) for name, bet in self.bets.items()
        }

    @property
    def limit(self) -> float:
        """The logarithm of what one fortune has to be multiplied by."""
        return math.log(len(self.bets) / FALSE_ALARM)

    @property
    def log_evidence(self) -> float:
        """Base 10 (of gross faults the power itself is beyond a float), after paying for the number of bets: -log10 of the odds of so much luck. Infinite once a token came
        that has probability 0."""
        if self.num_impossible:
            return math.inf
        best = max(account.peak for account in self._accounts.values())
        return max(0.0, (best - math.log(len(self.bets))) / math.log(10))

    @property
    def is_rejected(self) -> bool:
        return bool(self.num_impossible) or any(account.peak >= self.limit for account in self._accounts.values())

    @property
    def best(self) -> str:
        """The bet that won most."""
        return max(self._accounts, key=lambda name: self._accounts[name].peak)

    def num_tokens(self, name: str) -> int:
        return self._accounts[name].num_tokens

    def settle(
        self,
        name: str,
        g: Tensor,
        variance: Tensor | None = None,
        shift: Tensor | None = None,
        *,
        times: Tensor | None = None,
    ) -> None:
        """g: [N] float64, of N tokens. variance: [N], of g under the claim; shift: [N], its mean under the alternative: for
        a bet that smallest_share is asked about. times: [N] float64, how many tokens gave this g; None: one each."""
        totals = (0.0 if part is None else float(part.sum()) for part in (variance, shift))
        self._accounts[name].settle(g.cpu(), g.new_ones(len(g)).cpu() if times is None else times, *totals)

    def power_at(self, scale: float) -> float:
        """The odds of an alarm on `scale` times as many tokens, if they are like those that were seen."""
        if self.num_impossible:
            # so many in so few: it is missed with odds of e^-number
            return 1.0 - math.exp(-self.num_impossible * scale)
        return max(self._power(account, scale) for account in self._accounts.values())

    def smallest_share(self, name: str) -> float | None:
        """Of how many of the tokens seen the alternative of this bet (settle's shift) would have to take the place of
        the claim, for an alarm with odds of 0.99. None where no share would do.

        With stake λ a mean of δ adds λ δ - λ² σ²/2 per token to the logarithm, give or take λ σ; λ is the best one of
        those in play.
        """
        account = self._accounts[name]
        n = account.num_tokens
        if n == 0 or account.shift <= 0:
            return None
        sigma = math.sqrt(account.variance / n)
        needed = self.limit + math.log(len(account.stakes))
        biases = [
            needed / (n * stake) + stake * sigma * sigma / 2 + _QUANTILE * sigma / math.sqrt(n)
            for stake in account.stakes.tolist()
            if 0 < stake * self.bets[name].high <= 0.5
        ]
        share = min(biases) * n / account.shift
        return share if share <= 1.0 else None

    def _power(self, account: _Account, scale: float) -> float:
        n = account.num_tokens
        if n < 2:
            return 0.0
        mean = account.log_gain / n
        spread = (account.log_gain_sq / n - mean.square()).clamp(min=1e-12).sqrt()
        tokens = n * scale
        needed = self.limit + math.log(len(account.stakes))
        surplus = (tokens * mean - needed) / (math.sqrt(tokens) * spread)
        return float(torch.special.ndtr(surplus.max()))
