"""What a test is: it tries the real verifier, and then broken ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from foredraft.certificate.report import CheckResult
from foredraft.certificate.trial import Subject


@dataclass(frozen=True, slots=True)
class Found:
    """Of the real verifier. num_drafted: draft tokens; num_sampled: those that were drawn from a law. left_out: what could
    not be tested, a line each."""

    results: Sequence[CheckResult]
    num_drafted: int
    num_sampled: int
    left_out: Sequence[str] = ()


class Rejection(NamedTuple):
    """Of a broken verifier. by: the test that rejected it, None if none did. num_tokens: looked at. power: see
    ControlResult."""

    by: str | None
    num_tokens: int
    power: float | None


class Test(Protocol):
    @property
    def kind(self) -> str:
        """Of what is looked at (controls.py)."""
        ...

    def run(self) -> Found:
        """Try the real verifier. Once, and before `reject`."""
        ...

    def reject(self, subject: Subject, seconds: float) -> Rejection:
        """Try a broken one on no more than the real one was tried on, until it is rejected or so many seconds have gone."""
        ...
