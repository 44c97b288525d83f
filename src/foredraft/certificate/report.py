"""The certificate as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"

GREEDY, SEEDED, SAMPLED, DRAWN = "greedy", "seeded", "sampled", "drawn"
"""The kinds of what is looked at: three kinds of text, and the verifier's draws alone."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of the real verifier.

    name: "identity", "teacher-forced", "distribution" or "verification". kind: of what was looked at: "greedy", "seeded",
    "sampled" or "drawn"; with ", auto" behind it where the LLM's own policy decided on the drafts.
    num_texts, num_tokens: what was looked at; in a check of identity, texts with drafts.
    num_drafted: draft tokens that were verified for it. passed: whether the claim holds.
    detail: the result in one line. odds: of a false alarm and of a miss, in one line.
    figures: the numbers in them, by name. false_alarm: the odds, at most, that a lossless engine fails this check.
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
class ControlResult:
    """One broken verifier under the same check. says: what is broken. rejected: as it must be. by: the check that
    rejected it, None if none did. num_tokens: what that took. power: the odds that the check of the real verifier, with
    as many tokens as that had, would reject such a one; estimated, None where no chance is involved."""

    name: str
    says: str
    kind: str
    rejected: bool
    by: str | None
    num_tokens: int
    power: float | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """verdict: "passed" where every check passed and every control was rejected; "failed" where a check failed;
    "inconclusive" where all checks passed but a control passed too, or time ran out before it was rejected, so that they
    prove little. reason: in one line, None where it passed. left_out: what was not tested, and why, a line each.

    row_exact: whether rows are bit-exact here. tie: how wide a tie may be, in logits; 0 where rows are exact.
    drafts: how they were requested. speculative_tokens: draft tokens of a step, at most.
    false_alarm: the odds, at most, that a lossless engine fails: the sum over the checks. power: the least odds of
    rejecting a control by bets, None without one.

    The checks of texts and draws find faults of the sizes that `odds` states. The rules of verification themselves are
    tested by enumeration: their laws are exact to 1e-12 in float64, and to 3.4e-7 as compiled float32 (docs/internals/exactness.md).
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


def verdict_of(checks: list[CheckResult], controls: list[ControlResult], untried: list[str]) -> tuple[str, str | None]:
    """untried: the names of controls for which time ran out. -> (verdict, reason)"""
    failed = next((check for check in checks if not check.passed), None)
    if failed is not None:
        return FAILED, f"{failed.name}, {failed.kind}: {failed.detail}"
    missed = [f"{control.name} ({control.kind})" for control in controls if not control.rejected]
    if missed:
        return INCONCLUSIVE, (
            f"broken verifiers were not rejected: {', '.join(missed)}: raise --budget, or give prompts that are drafted for"
        )
    if untried:
        return INCONCLUSIVE, (
            f"the time was over before {len(untried)} broken verifiers were rejected: {', '.join(untried)}: raise --budget"
        )
    return PASSED, None
