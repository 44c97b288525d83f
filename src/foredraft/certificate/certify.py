"""The whole certificate: the tests on the real verifier, then the same tests on broken ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.certificate.controls import Control, Seen, applying, left_out
from foredraft.certificate.distribution import DistributionTest
from foredraft.certificate.draws import VerificationTest
from foredraft.certificate.identity import IdentityTest
from foredraft.certificate.prompts import PROMPTS
from foredraft.certificate.report import (
    GREEDY,
    SEEDED,
    Certificate,
    CheckResult,
    ControlResult,
    verdict_of,
)
from foredraft.certificate.setting import OVERTIME, Deadline, Setting, measured
from foredraft.certificate.trial import Found, Subject, Test
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.text.request import Prompt

BUDGET = 120.0
MAX_TOKENS = 96
NUM_TOKENS = 12_288
"""That the distribution test looks at, where the budget has room for them."""

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

    params: as for generate, all of them; temperature 0 leaves out what is drawn. A seed also fixes the certificate's own
    noise. logprobs and speculative_tokens 0 have no meaning here. prompts: None takes built-in ones.
    budget: seconds. What is looked at is planned from it, in tokens and draws and no more than a test needs, by the
    processor time that they take: a small model needs less than the budget. A busy machine takes longer over the same
    work, at most about 1.5 times the budget by the clock on the wall; what that cuts is in left_out.
    num_tokens: that the distribution test looks at, at most. progress: called with what comes next.

    Raises ForedraftError, one line, for what cannot be honoured, and while requests of the LLM run; RequestError where the
    target alone fails.
    """
    if not budget > 0 or num_tokens < 1:
        raise ForedraftError(f"budget and num_tokens must be above 0, not {budget} and {num_tokens}")
    if prompts is not None and not prompts:
        raise ForedraftError("give one prompt at least, or None for the built-in ones")
    return Check(setting_of(llm, params, prompts or PROMPTS, budget, num_tokens), progress or (lambda _: None)).run()


def setting_of(
    llm: LLM, params: SamplingParams | None, prompts: Sequence[Prompt], budget: float, num_tokens: int
) -> Setting:
    """Nothing is measured yet. The parameters are complete, without what says nothing about exactness."""
    resolved = llm.frontend.prepare([0], params or SamplingParams(max_tokens=MAX_TOKENS)).params
    chosen = replace(
        resolved,
        logprobs=None,
        prompt_logprobs=None,
        max_tokens=resolved.max_tokens or MAX_TOKENS,
        speculative_tokens=resolved.speculative_tokens or None,
    )
    return Setting(llm, chosen, list(prompts), chosen.max_tokens or MAX_TOKENS, Deadline(budget), num_tokens)


class Check:
    """One run of it."""

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._results: list[CheckResult] = []
        self._controls: list[ControlResult] = []
        self._left_out: list[str] = []
        self._pending: list[tuple[Control, Test]] = []
        self._untried: list[str] = []

    def run(self) -> Certificate:
        self._progress("measuring")
        self._setting, too_long = measured(self._setting)
        self._left_out += too_long
        real = Subject(self._setting.llm)
        self._try(IdentityTest(self._setting, real, GREEDY))
        if self._setting.params.is_greedy:
            self._left_out.append(
                "distribution and seeded identity, and their controls: at temperature 0 nothing is drawn"
            )
        else:
            self._try(IdentityTest(self._setting, real, SEEDED))
            distribution = DistributionTest(self._setting, real)
            self._try(distribution)
            self._try(VerificationTest(self._setting, real, distribution.chosen))
        self._run_controls()
        return self._certificate()

    def _try(self, test: Test) -> None:
        """The real verifier; its controls wait until all of them are known."""
        self._progress(f"{test.kind} tokens")
        found = test.run()
        self._results += found.results
        seen = self._seen(test.kind, found)
        self._pending += [(control, test) for control in applying(test.kind, seen)]
        self._left_out += [*found.left_out, *left_out(test.kind, seen)]

    def _seen(self, kind: str, found: Found) -> Seen:
        params = self._setting.params_of(kind)
        penalty = params.frequency_penalty + params.presence_penalty
        return Seen(found.num_drafted, found.num_sampled, params.verifier, self._setting.gamma, found.max_len, penalty)

    def _run_controls(self) -> None:
        for index, (control, test) in enumerate(self._pending):
            if not self._setting.deadline.is_over():
                self._progress(f"control {index + 1} of {len(self._pending)}: {control.name}")
                self._run_control(control, test)
            else:
                self._untried.append(f"{control.name} ({test.kind})")
        if self._untried:
            seconds = OVERTIME * self._setting.deadline.seconds
            self._left_out.append(
                f"broken verifiers for which {seconds:.0f} s were not enough: {', '.join(self._untried)}"
            )

    def _run_control(self, control: Control, test: Test) -> None:
        llm = self._setting.llm
        target = control.target(llm.target) if control.target else None
        found = test.reject(Subject(llm, control.verifier, target))
        if found.is_cut:
            self._untried.append(f"{control.name} ({test.kind})")
            return
        self._controls.append(
            ControlResult(
                control.name, control.says, test.kind, found.by is not None, found.by, found.num_tokens, found.power
            )
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
