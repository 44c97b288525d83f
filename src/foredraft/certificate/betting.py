"""A test by betting: whoever wins much at fair odds shows that they are not fair.

The claim is that each token x of a text was drawn from a known distribution p, given what precedes it. A *bet* is a bounded
function g of the token whose mean under p is 0. Staking the share λ of a fortune on it multiplies that fortune by
1 + λ g(x), whose mean is 1 under the claim; so the fortune is a martingale, and by Ville's inequality the odds that it
ever reaches k times its beginning are at most 1/k: exactly, for every number of tokens, however dependent, and for
whatever reason one stops. (Ville 1939; Shafer, "Testing by betting", 2021; Waudby-Smith and Ramdas, arXiv:2010.09686.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.certificate.controls import Control
from foredraft.certificate.report import CheckResult, CheckRun, ControlResult
from foredraft.certificate.setting import OVERTIME, Deadline
from foredraft.certificate.texts import Text
from foredraft.errors import RequestError

FALSE_ALARM = 1e-6
"""The odds that all bets together fail a text that keeps the claim, at most."""

_SHARES = (0.9, 0.5, 0.25, 0.12, 0.06, 0.03)
"""Of the largest stake that a bet allows, in both directions."""
_QUANTILE = 2.326
"""Of the normal distribution, for a power of 0.99."""


@dataclass(frozen=True, slots=True)
class Bet:
    """-1 <= g <= high for every token. description: what the bet would notice."""

    description: str
    high: float = 1.0

    @property
    def stakes(self) -> Tensor:
        shares = torch.tensor(_SHARES, dtype=torch.float64)
        return torch.cat([shares, -shares / self.high])


SURPRISE = Bet("tokens are too likely or too unlikely on average")
"""On surprise(p), without its mean."""


class Account:
    """One bet's fortunes, as a logarithm for each stake. peak: the largest mean fortune so far. log_gain, log_gain_sq: sums
    over tokens of the logarithms and of their squares. variance, shift: sums of what `update` was given."""

    def __init__(self, bet: Bet) -> None:
        self.bet, self.stakes = bet, bet.stakes
        self.log_gain, self.log_gain_sq = torch.zeros_like(self.stakes), torch.zeros_like(self.stakes)
        self.num_tokens = 0
        self.peak = self.variance = self.shift = 0.0

    def update(self, g: Tensor, variance: Tensor | None = None, shift: Tensor | None = None) -> None:
        """g: [N] float64, of N tokens. variance: [N], of g under the claim; shift: [N], its mean under the alternative:
        `smallest_share` needs both."""
        gains = torch.log1p(self.stakes * g.cpu()[:, None])
        self.log_gain += gains.sum(0)
        self.log_gain_sq += gains.square().sum(0)
        self.num_tokens += len(g)
        self.variance += 0.0 if variance is None else float(variance.sum())
        self.shift += 0.0 if shift is None else float(shift.sum())
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

    def smallest_share(self, limit: float) -> float | None:
        """The smallest share of tokens in which the alternative (see `update`) could replace the claim and still raise an
        alarm with odds of 0.99. None where no share would do.

        With stake λ a mean of δ adds λ δ - λ² σ²/2 per token to the logarithm, give or take λ σ; λ is the best one of
        those in play.
        """
        n = self.num_tokens
        if n == 0 or self.shift <= 0:
            return None
        sigma = math.sqrt(self.variance / n)
        needed = limit + math.log(len(self.stakes))
        biases = [
            needed / (n * stake) + stake * sigma * sigma / 2 + _QUANTILE * sigma / math.sqrt(n)
            for stake in self.stakes.tolist()
            if 0 < stake * self.bet.high <= 0.5
        ]
        share = min(biases) * n / self.shift
        return share if share <= 1.0 else None


class Bets:
    """Several bets on the same tokens, each with a fortune of its own. Together they raise a false alarm with odds of at
    most FALSE_ALARM, because each of K must multiply its fortune by K / FALSE_ALARM.

    Fortunes are compared with the limit after each `update`, so updates come in the order of time.
    """

    def __init__(self, bets: Mapping[str, Bet]) -> None:
        self.accounts = {name: Account(bet) for name, bet in bets.items()}
        self.num_impossible = 0

    @property
    def limit(self) -> float:
        """The logarithm of the factor at which one fortune raises an alarm."""
        return math.log(len(self.accounts) / FALSE_ALARM)

    @property
    def log_evidence(self) -> float:
        """-log10 of the odds of so much luck, corrected for the number of bets. Infinite once a token of probability 0
        came. A logarithm, because a gross fault wins more than a float holds."""
        if self.num_impossible:
            return math.inf
        best = max(account.peak for account in self.accounts.values())
        return max(0.0, (best - math.log(len(self.accounts))) / math.log(10))

    @property
    def is_rejected(self) -> bool:
        return bool(self.num_impossible) or any(account.peak >= self.limit for account in self.accounts.values())

    def update(self, name: str, g: Tensor, variance: Tensor | None = None, shift: Tensor | None = None) -> None:
        """See Account.update."""
        self.accounts[name].update(g, variance, shift)

    def power_at(self, scale: float) -> float:
        """The odds of an alarm on `scale` times as many tokens, if they are like those so far."""
        if self.num_impossible:
            # so many in so few: it is missed with odds of e^-number
            return 1.0 - math.exp(-self.num_impossible * scale)
        return max(account.power(scale, self.limit) for account in self.accounts.values())

    def smallest_share(self, name: str) -> float | None:
        """See Account.smallest_share. None for a bet that is not placed, too."""
        account = self.accounts.get(name)
        return account.smallest_share(self.limit) if account else None

    @property
    def summary(self) -> str:
        """One line."""
        if self.num_impossible:
            return f"{self.num_impossible} tokens have probability 0 under the target's law"
        won = (
            f"the best bet against the claim won {_power_of_ten(self.log_evidence)} to 1, "
            f"and {1 / FALSE_ALARM:,.0f} rejects"
        )
        best = max(self.accounts.values(), key=lambda account: account.peak)
        return f"{best.bet.description}: {won}" if self.is_rejected else won

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


# --- checks -------------------------------------------------------------------------------------------------------


class TokenSource(ABC):
    """Makes tokens and bets on them, a batch at a time, until there are num_wanted.

    num_texts: or steps. num_drafted: draft tokens; num_sampled: those that were drawn from a distribution;
    num_by_heads: those of them by drafters that read hidden states. texts: the last ones, if it writes texts.
    """

    texts: Sequence[Text] = ()

    def __init__(self, bets: Bets, num_wanted: int) -> None:
        self.bets = bets
        self.num_wanted = num_wanted
        self.num_texts = self.num_tokens = self.num_drafted = self.num_sampled = self.num_by_heads = 0

    @property
    def is_complete(self) -> bool:
        """Whether no more tokens are needed: there are enough, or the bets are won."""
        return self.num_tokens >= self.num_wanted or self.bets.is_rejected

    @abstractmethod
    def place(self) -> None:
        """Make the next batch, and bet on it."""

    @property
    def shares(self) -> dict[str, float | None]:
        """Of faults that would be found with odds 0.99, by name: the smallest share of tokens."""
        return {}

    @property
    def odds(self) -> str:
        """Of a false alarm and of a miss, in one line."""
        return f"false alarm at most {FALSE_ALARM:.0e}"


@dataclass(slots=True)
class BettingCheck:
    """A check by bets on tokens. kind: of them. new_source: of so many tokens, under a broken verifier or (None) the real one.
    num_wanted: tokens to look at, at most; as many as the real verifier was checked on, once it was. texts: some of those.
    """

    name: str
    kind: str
    deadline: Deadline
    num_wanted: int
    new_source: Callable[[Control | None, int], TokenSource]
    texts: Sequence[Text] = ()

    def run(self) -> CheckRun:
        """Check the real verifier. Raises RequestError for a text that fails."""
        source = self.new_source(None, self.num_wanted)
        self._place_all(source, budgets=1.0)
        self.texts, self.num_wanted = source.texts, source.num_tokens
        result = CheckResult(
            name=self.name,
            kind=self.kind,
            num_texts=source.num_texts,
            num_tokens=source.num_tokens,
            num_drafted=source.num_drafted,
            passed=not source.bets.is_rejected,
            detail=source.bets.summary,
            odds=source.odds,
            figures=source.bets.figures | source.shares,
            false_alarm=FALSE_ALARM,
        )
        cut = f"{self.kind} tokens behind {source.num_tokens:,}, of {source.num_wanted:,}: the time was over"
        left_out = [] if source.is_complete else [cut]
        return CheckRun([result], source.num_drafted, source.num_sampled, source.num_by_heads, left_out=left_out)

    def reject(self, control: Control) -> ControlResult | None:
        """Check a broken verifier, after `run`, on as many tokens at most. -> None if time ran out before it was rejected"""
        source = self.new_source(control, self.num_wanted)
        try:
            self._place_all(source, budgets=OVERTIME)
        except RequestError:
            return control.result(self.kind, self.name, 0)
        if not source.is_complete:
            return None
        power = source.bets.power_at(self.num_wanted / max(source.num_tokens, 1))
        return control.result(self.kind, self.name if source.bets.is_rejected else None, source.num_tokens, power)

    def _place_all(self, source: TokenSource, *, budgets: float) -> None:
        """Bet until the source is complete or so many budgets of time are spent."""
        is_over = False
        while not (source.is_complete or is_over):
            source.place()
            is_over = self.deadline.is_over(budgets=budgets)
