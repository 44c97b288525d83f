"""The certificate as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"

GREEDY, SEEDED, SAMPLED, DRAWN = "greedy", "seeded", "sampled", "drawn"
"""The kinds of tokens: those of three kinds of text, and those of the verifier alone."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of the real verifier.

    name: "identity", "teacher-forced", "distribution" or "verification". kind: of the tokens: "greedy", "seeded", "sampled"
    or "drawn", followed by ", auto" if the LLM's own policy decided on the drafts.
    num_texts: steps in the check of verification; in a check of identity, texts with drafts. num_drafted: draft tokens.
    detail: the result in one line. odds: of a false alarm and of a miss, in one line. figures: the numbers in both.
    false_alarm: an upper bound on the probability that a lossless engine fails this check.
    """

    name: str
    kind: str
    num_texts: int
    num_tokens: int
    num_drafted: int
    passed: bool
    detail: str
    odds: str
    figures: dict[str, Any]
    false_alarm: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckRun:
    """A check of the real verifier, and the drafts it involved. num_sampled: draft tokens drawn from a distribution;
    num_by_heads: those drawn by drafters that read hidden states. max_len: tokens of the longest text, prompt included.
    left_out: what could not be tested, one line each."""

    results: Sequence[CheckResult]
    num_drafted: int = 0
    num_sampled: int = 0
    num_by_heads: int = 0
    max_len: int = 0
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ControlResult:
    """One broken verifier under the same check. says: what is broken. rejected: whether it was, as it must be. by: the check
    that rejected it, None if none did. num_tokens: looked at. power: the estimated probability of rejecting it on as many
    tokens as the real verifier was checked on; None where no chance is involved."""

    name: str
    says: str
    kind: str
    rejected: bool
    by: str | None
    num_tokens: int
    power: float | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """verdict: "passed" if every check passed and every control was rejected; "failed" if a check failed; otherwise
    "inconclusive": a control passed, or time ran out before it was rejected, so the checks prove little. reason: of the
    verdict, in one line; None if it is "passed". left_out: what was not tested, and why, one line each.

    drafts: how they were requested. speculative_tokens: the most draft tokens of a step. row_exact: whether rows are
    bit-exact here. tie: how wide a tie may be, in logits; 0 where rows are exact.
    false_alarm: an upper bound on the probability that a lossless engine fails: the sum over the checks. power: the lowest
    probability of rejecting a control by bets; None without such a control.
    """

    verdict: str
    reason: str | None
    method: str
    drafts: str
    speculative_tokens: int
    temperature: float
    seed: int
    row_exact: bool
    tie: float
    num_prompts: int
    seconds: float
    false_alarm: float
    power: float | None
    checks: list[CheckResult]
    controls: list[ControlResult]
    left_out: list[str]

    @property
    def passed(self) -> bool:
        return self.verdict == PASSED

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


def verdict_of(
    checks: Sequence[CheckResult], controls: Sequence[ControlResult], untried: Sequence[str]
) -> tuple[str, str | None]:
    """untried: the names of controls for which time ran out. -> (verdict, reason)"""
    failed = next((check for check in checks if not check.passed), None)
    if failed is not None:
        return FAILED, f"{failed.name}, {failed.kind}: {failed.detail}"
    if missed := [f"{control.name} ({control.kind})" for control in controls if not control.rejected]:
        return INCONCLUSIVE, (
            f"broken verifiers were not rejected: {', '.join(missed)}: raise --budget, or give prompts for which drafts are made"
        )
    if untried:
        return INCONCLUSIVE, f"time ran out before {len(untried)} broken verifiers were tested: raise --budget"
    return PASSED, None
