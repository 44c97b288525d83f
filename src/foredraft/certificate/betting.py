"""A test by betting: winning a lot at fair odds is evidence that the odds are not fair.

The claim is that each token x of a text was drawn from a known distribution p, given what precedes it. A *bet* is a bounded
function g of the token whose mean under p is 0. Staking a share λ of a fortune on it multiplies the fortune by
1 + λ g(x), whose mean is 1 under the claim. So the fortune is a martingale, and by Ville's inequality the probability that
it ever reaches k times its initial value is at most 1/k. This is exact for any number of tokens, however dependent, and for any
reason to stop. (Ville 1939; Shafer, "Testing by betting", 2021; Waudby-Smith and Ramdas, arXiv:2010.09686.)
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
"""An upper bound on the probability that all bets together fail texts for which the claim is true."""

_SHARES = (0.9, 0.5, 0.25, 0.12, 0.06, 0.03)
"""Stakes, as shares of the largest one that a bet allows, in both directions."""
_QUANTILE = 2.326
"""The quantile of the normal distribution for a power of 0.99."""


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
"""The bet on surprise(p) minus its mean."""


class Account:
    """One bet's fortunes, as logarithms, one for each stake. peak: the logarithm of the largest mean fortune so far. log_gain,
    log_gain_sq: sums over tokens of log gains and of their squares. variance, shift: sums of what `update` was given."""

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
        # the initial fortune is split equally between the stakes
        self.peak = max(self.peak, float(self.log_gain.logsumexp(0)) - math.log(len(self.stakes)))

    def power(self, scale: float, limit: float) -> float:
        """The probability that the fortune passes exp(limit) on `scale` times as many tokens of the same kind."""
        n = self.num_tokens
        if n < 2:
            return 0.0
        mean = self.log_gain / n
        spread = (self.log_gain_sq / n - mean.square()).clamp(min=1e-12).sqrt()
        tokens = n * scale
        surplus = (tokens * mean - limit - math.log(len(self.stakes))) / (math.sqrt(tokens) * spread)
        return float(torch.special.ndtr(surplus.max()))

    def smallest_share(self, limit: float) -> float | None:
        """The smallest share of tokens for which the alternative (see `update`) could replace the claim and still raise an
        alarm with probability 0.99. None if no share would do.

        With stake λ, a mean of δ adds λ δ - λ² σ²/2 per token to the logarithm, with standard deviation λ σ; λ is the best of
        the stakes in use.
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
    """Several bets on the same tokens, each with its own fortune. Together they raise a false alarm with a probability of at
    most FALSE_ALARM, because each of K must multiply its fortune by K / FALSE_ALARM.

    Fortunes are compared with the limit after each `update`, so updates must come in chronological order.
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
        """-log10 of the probability of winning this much by luck, corrected for the number of bets. Infinite once a token of
        probability 0 occurred. A logarithm, because a gross fault wins more than a float can hold."""
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
        """The probability of an alarm on `scale` times as many tokens, if they are like those so far."""
        if self.num_impossible:
            # missed with probability e^-n if n impossible tokens are expected
            return 1.0 - math.exp(-self.num_impossible * scale)
        return max(account.power(scale, self.limit) for account in self.accounts.values())

    def smallest_share(self, name: str) -> float | None:
        """See Account.smallest_share. Also None for a bet that is not placed."""
        account = self.accounts.get(name)
        return account.smallest_share(self.limit) if account else None

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.num_impossible:
            return f"{self.num_impossible} tokens have probability 0 under the target's distribution"
        won = (
            f"the best bet against the claim won {_power_of_ten(self.log_evidence)} to 1; "
            f"rejection requires {1 / FALSE_ALARM:,.0f} to 1"
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
    """Generates tokens and bets on them, a batch at a time, until there are num_wanted.

    num_texts: texts, or steps. num_drafted: draft tokens; num_sampled: those drawn from a distribution; num_by_heads: those
    drawn by drafters that read hidden states. texts: the last batch, if the source writes texts.
    """

    texts: Sequence[Text] = ()

    def __init__(self, bets: Bets, num_wanted: int) -> None:
        self.bets = bets
        self.num_wanted = num_wanted
        self.num_texts = self.num_tokens = self.num_drafted = self.num_sampled = self.num_by_heads = 0

    @property
    def is_complete(self) -> bool:
        """Whether no more tokens are needed: there are enough, or a bet is won."""
        return self.num_tokens >= self.num_wanted or self.bets.is_rejected

    @abstractmethod
    def place(self) -> None:
        """Generate the next batch, and bet on it."""

    @property
    def shares(self) -> dict[str, float | None]:
        """By name of a fault: the smallest share of tokens at which it would be found with probability 0.99."""
        return {}

    @property
    def odds(self) -> str:
        """The odds of a false alarm and of a miss, in one line."""
        return f"false alarm at most {FALSE_ALARM:.0e}"


@dataclass(slots=True)
class BettingCheck:
    """A check by bets on tokens. kind: of the tokens. new_source: given a control (None: the real verifier) and a number of tokens.
    num_wanted: the most tokens to look at; after `run`, as many as the real verifier was checked on. texts: some of those.
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
        cut = f"{self.kind} tokens after the first {source.num_tokens:,}, of {source.num_wanted:,}: out of time"
        left_out = [] if source.is_complete else [cut]
        return CheckRun([result], source.num_drafted, source.num_sampled, source.num_by_heads, left_out=left_out)

    def reject(self, control: Control) -> ControlResult | None:
        """Check a broken verifier, after `run`, on at most as many tokens. -> None if time ran out before it was rejected"""
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
        """Bet until the source is complete or this many budgets of time are spent."""
        is_over = False
        while not (source.is_complete or is_over):
            source.place()
            is_over = self.deadline.is_over(budgets=budgets)
