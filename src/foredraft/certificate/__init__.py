"""`foredraft check`: a certificate that speculation is lossless, for one target, one drafter and one way of sampling.

It checks texts and draws of the user's models. The same checks then run on broken verifiers, to show what they would notice.
The rules of verification are also tested by enumeration (docs/internals/exactness.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.certificate.betting import BettingCheck
from foredraft.certificate.controls import Control, controls_for
from foredraft.certificate.distribution import distribution_check
from foredraft.certificate.identity import IdentityCheck
from foredraft.certificate.report import (
    DRAWN,
    GREEDY,
    SAMPLED,
    SEEDED,
    Certificate,
    CheckResult,
    CheckRun,
    ControlResult,
    verdict_of,
)
from foredraft.certificate.setting import BUDGET, NUM_TOKENS, OVERTIME, PROMPTS, Setting, measured, setting_of
from foredraft.certificate.verification import NOTHING_DRAWN, verification_check
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.request import Prompt

__all__ = ["Certificate", "CheckResult", "ControlResult", "check"]

Progress = Callable[[str], None]
Check = IdentityCheck | BettingCheck


def check(
    llm: LLM,
    params: SamplingParams | None = None,
    *,
    prompts: Sequence[Prompt] | None = None,
    budget: float = BUDGET,
    num_tokens: int = NUM_TOKENS,
    progress: Progress | None = None,
) -> Certificate:
    """Check that speculation is lossless with this target, these drafters and these settings (docs/internals/certificate.md).

    params: as for generate; at temperature 0 the checks of drawn tokens are skipped. A seed also fixes the certificate's own
    noise. logprobs and speculative_tokens=0 are ignored. prompts: None uses the built-in ones.
    budget: seconds. It decides how many tokens and draws are planned, by the processor time they take, but no more than a
    check needs: a small model takes less than the budget. On a busy machine the same work takes longer, up to about 1.5
    times the budget of wall-clock time; left_out lists what is cut after that.
    num_tokens: the most tokens that the distribution check looks at. progress: called with the name of each stage as it starts.

    Raises ForedraftError (one line) for settings that cannot be honoured and while the LLM is running requests; RequestError
    if the target fails even without drafts.
    """
    if not budget > 0 or num_tokens < 1:
        raise ForedraftError(f"budget and num_tokens must be above 0, not {budget} and {num_tokens}")
    if prompts is not None and not prompts:
        raise ForedraftError("give at least one prompt, or None for the built-in ones")
    setting = setting_of(llm, params, prompts or PROMPTS, budget, num_tokens)
    return Certification(setting, progress or (lambda _: None)).run()


class Certification:
    """One run of the certificate. The controls run last, after every check of the real verifier."""

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._results: list[CheckResult] = []
        self._controls: list[ControlResult] = []
        self._left_out: list[str] = []
        self._pending: list[tuple[Control, Check]] = []

    def run(self) -> Certificate:
        self._progress("measuring")
        setting = self._setting = measured(self._setting)
        self._left_out += setting.left_out
        self._check(GREEDY, IdentityCheck(setting, GREEDY))
        if setting.params.is_greedy:
            self._left_out.append(
                "distribution and seeded identity, and their controls: at temperature 0 nothing is drawn"
            )
        else:
            self._check(SEEDED, IdentityCheck(setting, SEEDED))
            distribution = distribution_check(setting)
            self._check(SAMPLED, distribution)
            self._check(DRAWN, verification_check(setting, distribution.texts))
        return self._certificate(self._run_controls())

    def _check(self, kind: str, check: Check | None) -> None:
        """Check the real verifier. check: None if no draft was drawn from a distribution."""
        self._progress(f"{kind} tokens")
        run = check.run() if check else CheckRun([], left_out=[NOTHING_DRAWN])
        self._results += run.results
        controls, left_out = controls_for(kind, run, self._setting.params_of(kind))
        if check:
            self._pending += [(control, check) for control in controls]
        self._left_out += [*run.left_out, *left_out]

    def _run_controls(self) -> list[str]:
        """-> the names of the controls for which time ran out"""
        untried, deadline = list[str](), self._setting.deadline
        for index, (control, check) in enumerate(self._pending):
            self._progress(f"control {index + 1} of {len(self._pending)}: {control.name}")
            result = None if deadline.is_over() else check.reject(control)
            if result is None:
                untried.append(f"{control.name} ({check.kind})")
            else:
                self._controls.append(result)
        if untried:
            seconds = OVERTIME * deadline.seconds
            self._left_out.append(f"broken verifiers not fully tested within {seconds:g} s: {', '.join(untried)}")
        return untried

    def _certificate(self, untried: Sequence[str]) -> Certificate:
        setting, llm = self._setting, self._setting.llm
        verdict, reason = verdict_of(self._results, self._controls, untried)
        return Certificate(
            verdict=verdict,
            reason=reason,
            method=llm.method,
            drafts=setting.drafts_line,
            speculative_tokens=setting.gamma,
            temperature=float(setting.params.temperature or 0.0),
            seed=setting.seed,
            row_exact=llm.target.traits.row_exact,
            tie=2 * setting.noise,
            num_prompts=len(setting.prompts),
            seconds=setting.deadline.spent,
            false_alarm=sum(result.false_alarm for result in self._results),
            power=min((control.power for control in self._controls if control.power is not None), default=None),
            checks=self._results,
            controls=self._controls,
            left_out=self._left_out,
        )
