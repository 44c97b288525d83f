"""What a check is, and what all checks by betting do alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from foredraft.certificate.betting import FALSE_ALARM, Bets
from foredraft.certificate.report import CheckResult
from foredraft.certificate.setting import OVERTIME, Setting
from foredraft.certificate.texts import Subject, Text
from foredraft.errors import RequestError


@dataclass(frozen=True, slots=True)
class CheckRun:
    """A check of the real verifier. num_drafted: draft tokens; num_sampled: those that were drawn from a law. left_out: what
    could not be tested, a line each. max_len: tokens of the longest text, prompt included."""

    results: Sequence[CheckResult]
    num_drafted: int = 0
    num_sampled: int = 0
    left_out: Sequence[str] = ()
    max_len: int = 0


class Rejection(NamedTuple):
    """A check of a broken verifier. by: the check that rejected it, None if none did. num_tokens: looked at. power: see
    ControlResult. is_cut: time ran out before it was rejected."""

    by: str | None
    num_tokens: int
    power: float | None = None
    is_cut: bool = False


class Check(Protocol):
    @property
    def kind(self) -> str:
        """Of what is looked at (report.py)."""
        ...

    def run(self) -> CheckRun:
        """Check the real verifier. Once, and before `reject`."""
        ...

    def reject(self, subject: Subject) -> Rejection:
        """Check a broken one on no more than the real one was checked on, until it is rejected or the time is over."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens that bets were placed on. num_texts: or steps. texts: some of them. is_cut: time ran out first."""

    bets: Bets
    num_texts: int
    num_tokens: int
    num_drafted: int
    num_sampled: int
    is_cut: bool
    texts: Sequence[Text] = ()


class BettingCheck(ABC):
    """A check by bets on tokens. texts: some of the real verifier's."""

    name: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, setting: Setting, real: Subject) -> None:
        self.texts: Sequence[Text] = ()
        self._setting = setting
        self._real = real
        self._num_tokens = 0

    def run(self) -> CheckRun:
        """Raises RequestError for a text that fails."""
        wanted = self._num_wanted
        sample = self._sample(self._real, wanted, budgets=1.0)
        self.texts, self._num_tokens = sample.texts, sample.num_tokens
        bets = sample.bets
        result = CheckResult(
            self.name, self.kind, sample.num_texts, sample.num_tokens, sample.num_drafted, not bets.is_rejected,
            bets.summary, self._odds(bets), bets.figures | self._shares(bets), FALSE_ALARM,
        )  # fmt: skip
        cut = [f"{self.kind} tokens behind {sample.num_tokens:,}, of {wanted:,}: the time was over"]
        return CheckRun([result], sample.num_drafted, sample.num_sampled, cut if sample.is_cut else [])

    def reject(self, subject: Subject) -> Rejection:
        try:
            sample = self._sample(subject, self._num_tokens, budgets=OVERTIME)
        except RequestError:
            return Rejection(self.name, 0)
        power = sample.bets.power_at(self._num_tokens / max(sample.num_tokens, 1))
        by = self.name if sample.bets.is_rejected else None
        return Rejection(by, sample.num_tokens, power, sample.is_cut)

    @property
    @abstractmethod
    def _num_wanted(self) -> int:
        """Tokens to look at, at most."""

    @abstractmethod
    def _sample(self, subject: Subject, num_tokens: int, *, budgets: float) -> Sample:
        """Bet until there are num_tokens, the bets are won, or so many budgets of time are spent."""

    def _shares(self, bets: Bets) -> dict[str, float | None]:
        """Of faults that would be found with odds 0.99, by name: the smallest share of tokens."""
        return {}

    def _odds(self, bets: Bets) -> str:
        return f"false alarm at most {FALSE_ALARM:.0e}"
