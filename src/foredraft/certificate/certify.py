"""The whole certificate: the checks on the real verifier, then the same checks on broken ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.certificate.checks import Check, CheckRun
from foredraft.certificate.controls import Conditions, Control, applying, left_out
from foredraft.certificate.distribution import DistributionCheck
from foredraft.certificate.identity import IdentityCheck
from foredraft.certificate.report import GREEDY, SEEDED, Certificate, CheckResult, ControlResult, verdict_of
from foredraft.certificate.setting import OVERTIME, PROMPTS, Deadline, Setting, measured
from foredraft.certificate.texts import Subject
from foredraft.certificate.verification import VerificationCheck
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.request import Prompt

BUDGET = 120.0
MAX_TOKENS = 96
NUM_TOKENS = 12_288
"""That the distribution check looks at, where the budget has room for them."""

Progress = Callable[[str], None]


def check(
    llm: LLM,
    params: SamplingParams | None = None,
    *,
    prompts: Sequence[Prompt] | None = None,
    budget: float = BUDGET,
    num_tokens: int = NUM_TOKENS,
    progress: Progress | None = None,
) -> Certificate:
    """Is speculation lossless with this target, these drafters and these settings? See docs/internals/certificate.md.

    params: as for generate, all of them; at temperature 0 the checks of drawn tokens are left out. A seed also fixes the
    certificate's own noise. logprobs and speculative_tokens 0 have no meaning here. prompts: None takes built-in ones.
    budget: seconds. Work is planned from it in tokens and draws, no more than a check needs, by the processor time that
    they take: a small model needs less than the budget. A busy machine takes longer over the same work, up to about 1.5
    times the budget of wall-clock time; what is cut then is in left_out.
    num_tokens: that the distribution check looks at, at most. progress: called with what comes next.

    Raises ForedraftError, one line, for what cannot be honoured, and while requests of the LLM run; RequestError where the
    target alone fails.
    """
    if not budget > 0 or num_tokens < 1:
        raise ForedraftError(f"budget and num_tokens must be above 0, not {budget} and {num_tokens}")
    if prompts is not None and not prompts:
        raise ForedraftError("give one prompt at least, or None for the built-in ones")
    setting = setting_of(llm, params, prompts or PROMPTS, budget, num_tokens)
    return Certification(setting, progress or (lambda _: None)).run()


def setting_of(
    llm: LLM, params: SamplingParams | None, prompts: Sequence[Prompt], budget: float, num_tokens: int
) -> Setting:
    """Before anything is measured. The parameters are complete, without those that exactness does not depend on."""
    resolved = llm.frontend.prepare([0], params or SamplingParams(max_tokens=MAX_TOKENS)).params
    length = resolved.max_tokens or MAX_TOKENS
    chosen = replace(
        resolved,
        logprobs=None,
        prompt_logprobs=None,
        max_tokens=length,
        speculative_tokens=resolved.speculative_tokens or None,
    )
    return Setting(llm, chosen, list(prompts), length, Deadline(budget), num_tokens)


class Certification:
    """One run of it."""

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._results: list[CheckResult] = []
        self._controls: list[ControlResult] = []
        self._left_out: list[str] = []
        self._pending: list[tuple[Control, Check]] = []
        self._untried: list[str] = []

    def run(self) -> Certificate:
        self._progress("measuring")
        self._setting, too_long = measured(self._setting)
        self._left_out += too_long
        setting, real = self._setting, Subject(self._setting.llm)
        self._run_check(IdentityCheck(setting, real, GREEDY))
        if setting.params.is_greedy:
            self._left_out.append(
                "distribution and seeded identity, and their controls: at temperature 0 nothing is drawn"
            )
        else:
            self._run_check(IdentityCheck(setting, real, SEEDED))
            distribution = DistributionCheck(setting, real)
            self._run_check(distribution)
            self._run_check(VerificationCheck(setting, real, distribution.texts))
        self._run_controls()
        return self._certificate()

    def _run_check(self, check: Check) -> None:
        """With the real verifier. The controls wait until it has passed all checks or failed some."""
        self._progress(f"{check.kind} tokens")
        run = check.run()
        self._results += run.results
        conditions = self._conditions(check.kind, run)
        self._pending += [(control, check) for control in applying(check.kind, conditions)]
        self._left_out += [*run.left_out, *left_out(check.kind, conditions)]

    def _conditions(self, kind: str, run: CheckRun) -> Conditions:
        params = self._setting.params_of(kind)
        penalty = params.frequency_penalty + params.presence_penalty
        return Conditions(
            run.num_drafted, run.num_sampled, params.verifier, self._setting.gamma, run.max_len, penalty
        )  # fmt: skip

    def _run_controls(self) -> None:
        for index, (control, check) in enumerate(self._pending):
            if not self._setting.deadline.is_over():
                self._progress(f"control {index + 1} of {len(self._pending)}: {control.name}")
                self._run_control(control, check)
            else:
                self._untried.append(f"{control.name} ({check.kind})")
        if self._untried:
            seconds = OVERTIME * self._setting.deadline.seconds
            self._left_out.append(
                f"broken verifiers for which {seconds:.0f} s were not enough: {', '.join(self._untried)}"
            )

    def _run_control(self, control: Control, check: Check) -> None:
        by, num_tokens, power, is_cut = check.reject(control.subject(self._setting.llm))
        if is_cut:
            self._untried.append(f"{control.name} ({check.kind})")
        else:
            self._controls.append(
                ControlResult(control.name, control.description, check.kind, by is not None, by, num_tokens, power)
            )

    def _certificate(self) -> Certificate:
        setting, llm = self._setting, self._setting.llm
        verdict, reason = verdict_of(self._results, self._controls, self._untried)
        powers = [control.power for control in self._controls if control.power is not None]
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
            power=min(powers) if powers else None,
            checks=self._results,
            controls=self._controls,
            left_out=self._left_out,
        )
