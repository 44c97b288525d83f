"""The whole certificate: the tests on the real verifier, then the same tests on broken ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.certificate.by_bets import DistributionTest, VerificationTest
from foredraft.certificate.by_identity import IdentityTest
from foredraft.certificate.controls import DRAWN, GREEDY, SEEDED, Control, Seen, applying, left_out
from foredraft.certificate.prompts import PROMPTS
from foredraft.certificate.report import Certificate, CheckResult, ControlResult, verdict_of
from foredraft.certificate.setting import Setting, measured
from foredraft.certificate.testing import Found, Test
from foredraft.certificate.trial import Subject
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.request import Prompt
from foredraft.sampling import SamplingParams

BUDGET = 60.0
MAX_TOKENS = 32
NUM_TOKENS = 12_288
"""That the distribution test looks at, where the time is there."""

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
    """Is speculation lossless with this target, these drafters and these settings? See docs/exactness.md.

    params: as for generate; temperature 0 leaves out what is drawn. A seed also fixes the certificate's own noise. n,
    stop, logprobs and speculative_tokens 0 have no meaning here. prompts: None takes built-in ones.
    budget: seconds, about; where they run out the tests look at less, and what they would find is stated accordingly.
    num_tokens: that the distribution test looks at, at most. progress: called with what comes next.

    Raises ForedraftError, one line, for what cannot be honoured, and while requests of the LLM run.
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
        n=1,
        stop=(),
        logprobs=None,
        prompt_logprobs=None,
        max_tokens=resolved.max_tokens or MAX_TOKENS,
        speculative_tokens=resolved.speculative_tokens or None,
    )
    return Setting(llm, chosen, list(prompts), chosen.max_tokens or MAX_TOKENS, budget, num_tokens)


class Check:
    """One run of it."""

    def __init__(self, setting: Setting, progress: Progress) -> None:
        self._setting = setting
        self._progress = progress
        self._started = time.perf_counter()
        self._results: list[CheckResult] = []
        self._controls: list[ControlResult] = []
        self._left_out: list[str] = []
        self._pending: list[tuple[Control, Test]] = []
        self._seconds: dict[str, float] = {}

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
            self._try(VerificationTest(self._setting, real, distribution.pairs))
        self._run_controls()
        return self._certificate()

    def _try(self, test: Test) -> None:
        """The real verifier; its controls wait until all of them are known."""
        self._progress(f"{test.kind} tokens")
        started = time.perf_counter()
        found = test.run()
        self._seconds[test.kind] = time.perf_counter() - started
        self._results += found.results
        seen = self._seen(test.kind, found)
        self._pending += [(control, test) for control in applying(test.kind, seen)]
        self._left_out += [*found.left_out, *left_out(test.kind, seen)]

    def _seen(self, kind: str, found: Found) -> Seen:
        rule = self._setting.params_of(kind).verifier
        return Seen(found.num_drafted, found.num_sampled, rule, self._setting.gamma)

    def _run_controls(self) -> None:
        # the quick ones leave more time to those that need it
        self._pending.sort(key=lambda pair: pair[1].kind == DRAWN)
        for index, (control, test) in enumerate(self._pending):
            self._progress(f"control {index + 1} of {len(self._pending)}: {control.name}")
            self._run_control(control, test, len(self._pending) - index)

    def _run_control(self, control: Control, test: Test, num_left: int) -> None:
        llm, budget = self._setting.llm, self._setting.budget
        subject = Subject(llm, control.verifier, control.target(llm.target) if control.target else None)
        # as long as the test of the real verifier took, while there is time; never less than its part of what is left
        time_left = budget - (time.perf_counter() - self._started)
        seconds = max(min(self._seconds[test.kind], time_left), time_left / num_left, 0.02 * budget)
        by, num_tokens, power = test.reject(subject, seconds)
        self._controls.append(
            ControlResult(control.name, control.says, test.kind, by is not None, by, num_tokens, power)
        )

    def _certificate(self) -> Certificate:
        setting, llm = self._setting, self._setting.llm
        verdict, reason = verdict_of(self._results, self._controls)
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
            seconds=time.perf_counter() - self._started,
            false_alarm=sum(result.false_alarm for result in self._results),
            power=min(powers) if powers else None,
            checks=self._results,
            controls=self._controls,
            left_out=self._left_out,
        )
