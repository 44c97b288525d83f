"""The whole certificate: the tests on the real verifier, then the same tests on broken ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foredraft.certificate.betting import FALSE_ALARM, Bets
from foredraft.certificate.controls import DRAWN, GREEDY, SAMPLED, SEEDED, Control, applying
from foredraft.certificate.distribution import Judge
from foredraft.certificate.draws import Draws, Pair, narrowed, pairs_of, sharpened, telling
from foredraft.certificate.forced import Forced, force
from foredraft.certificate.identity import Identity, compare_texts
from foredraft.certificate.prompts import PROMPTS
from foredraft.certificate.reading import row_noise
from foredraft.certificate.report import Certificate, CheckResult, ControlResult, verdict_of
from foredraft.certificate.trial import Subject, Text, Trial, plain
from foredraft.certificate.wording import bets_line, bets_odds, finite, forced_line, identity_line, identity_odds
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.request import Prompt
from foredraft.sampling import SamplingParams

BUDGET = 60.0
MAX_TOKENS = 32
NUM_TOKENS = 12_288
"""That the distribution test looks at, where the time is there."""

_DRAWN_PER_TOKEN = 32
"""So many tokens does the test of the verifier alone look at, for each of those: it needs no model."""

_NUM_PAIRS = 32
_NUM_IDS = 512
_CANDIDATES = 256

_CHUNK = 4
_ROUNDS = 8
_SHARE = 0.4
_WRITTEN = 12
"""How often all prompts are completed for the tests of identity, controls included, about."""

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
    """Is speculation lossless with this target, this drafter and these settings? See docs/exactness.md.

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
    chosen = _fitting(llm, params or SamplingParams(max_tokens=MAX_TOKENS))
    return _Check(llm, chosen, list(prompts or PROMPTS), budget, num_tokens, progress or (lambda _: None)).run()


def _fitting(llm: LLM, params: SamplingParams) -> SamplingParams:
    """The request's parameters, complete, without what says nothing about exactness."""
    resolved = llm.frontend.prepare([0], params).params
    return replace(
        resolved,
        n=1,
        stop=(),
        logprobs=None,
        prompt_logprobs=None,
        max_tokens=resolved.max_tokens or MAX_TOKENS,
        speculative_tokens=resolved.speculative_tokens or None,
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """Texts of one kind, and what was drafted for them."""

    texts: list[Text]
    num_drafted: int
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return sum(len(text.output_ids) for text in self.texts)


class _Check:
    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        prompts: list[Prompt],
        budget: float,
        num_tokens: int,
        progress: Progress,
    ) -> None:
        self._llm = llm
        self._params = params
        self._prompts = prompts
        self._budget = budget
        self._num_tokens = num_tokens
        self._progress = progress
        self._seed = params.seed or 0
        self._started = time.perf_counter()
        self._rate = 1.0
        self._noise = 0.0
        self._checks: list[CheckResult] = []
        self._controls: list[ControlResult] = []
        self._left_out: list[str] = []
        self._pending: list[tuple[Control, str]] = []
        self._plain: dict[str, list[Text]] = {}
        self._pairs: list[Pair] = []
        self._seconds: dict[str, float] = {}
        self._len = params.max_tokens or MAX_TOKENS

    def run(self) -> Certificate:
        self._progress("measuring")
        self._measure()
        self._timed(GREEDY, self._check_identity)
        if self._params.is_greedy:
            self._left_out.append("distribution and seeded identity: at temperature 0 nothing is drawn")
        else:
            self._timed(SEEDED, self._check_identity)
            self._timed(SAMPLED, self._check_distribution)
            self._timed(DRAWN, self._check_draws)
        # the quick ones leave more time to those that need it
        self._pending.sort(key=lambda pair: pair[1] == DRAWN)
        for index, (control, kind) in enumerate(self._pending):
            self._progress(f"control {index + 1} of {len(self._pending)}: {control.name}")
            self._run_control(control, kind, len(self._pending) - index)
        return self._certificate()

    def _timed(self, kind: str, test: Callable[[str], None]) -> None:
        started = time.perf_counter()
        test(kind)
        self._seconds[kind] = time.perf_counter() - started

    # --- sizes

    def _measure(self) -> None:
        """How fast this goes, and from that how much of it there will be."""
        llm, some = self._llm, self._prompts[:_CHUNK]
        params = replace(self._kind_params(GREEDY), max_tokens=min(8, self._len), ignore_eos=True)
        trial = Trial(Subject(llm), self._seed)
        trial.write(some[:1], params)  # whatever only a first pass has to do
        started = time.perf_counter()
        texts = trial.write(some, plain(params))
        spent = time.perf_counter() - started
        self._rate = sum(len(text.output_ids) for text in texts) / max(spent, 1e-6)
        self._noise = row_noise(llm.target, texts[0].tokens)
        affordable = _SHARE * self._budget * self._rate / _WRITTEN
        self._len = int(min(self._len, max(8, affordable / len(self._prompts))))
        num_prompts = max(1, min(len(self._prompts), int(affordable / self._len)))
        if num_prompts < len(self._prompts):
            self._left_out.append(
                f"{len(self._prompts) - num_prompts} of {len(self._prompts)} prompts, for lack of time: raise --budget"
            )
            self._prompts = self._prompts[:num_prompts]

    @property
    def _gamma(self) -> int:
        return self._params.speculative_tokens or self._llm.speculative_tokens

    @property
    def _time_left(self) -> float:
        return self._budget - (time.perf_counter() - self._started)

    def _kind_params(self, kind: str) -> SamplingParams:
        base = replace(self._params, max_tokens=self._len, min_tokens=min(self._params.min_tokens, self._len))
        if kind == GREEDY:
            return replace(base, temperature=0.0, seed=None, verification=None)
        if kind == SEEDED:
            return replace(base, seed=self._seed, verification=None)
        rule = None if base.verification == "coupled" else base.verification
        return replace(base, seed=None, verification=rule)

    # --- identity and the teacher-forced check

    def _check_identity(self, kind: str) -> None:
        self._progress(f"{kind} texts")
        self._plain[kind] = self._write_plain(kind)
        written = self._write_drafted(Subject(self._llm), kind, range(len(self._prompts)))
        found, forced = self._compare(kind, written.texts, range(len(self._prompts)))
        num_texts = len(written.texts)
        drafted = written.num_drafted
        self._checks += [
            CheckResult(
                "identity", kind, num_texts, written.num_tokens, drafted, not found.num_different,
                identity_line(found), identity_odds(num_texts, self._noise),
                {"num_tied": found.num_tied, "num_different": found.num_different,
                 "first_difference": found.first_difference},
            ),
            CheckResult(
                "teacher-forced", kind, num_texts, forced.num_tokens, drafted, not forced.num_wrong,
                forced_line(forced, self._noise), "no chance involved",
                {"num_missed": forced.num_missed, "num_wrong": forced.num_wrong, "worst_margin": forced.worst_margin},
            ),
        ]  # fmt: skip
        self._queue(kind, written)

    def _write_plain(self, kind: str) -> list[Text]:
        """One for each text that _write_drafted gives."""
        params = plain(self._kind_params(kind))
        texts = Trial(Subject(self._llm), self._seed).write(
            self._prompts, replace(params, n=1 if kind == GREEDY else 2)
        )
        return [text for text in texts for _ in range(2)] if kind == GREEDY else texts

    def _write_drafted(self, subject: Subject, kind: str, which: range) -> _Written:
        """These prompts, each twice: with the user's drafts, and with some that are partly wrong."""
        trial = Trial(subject, self._seed, self._plain[kind][2 * which.start : 2 * which.stop])
        texts = trial.write(self._prompts[which.start : which.stop], replace(self._kind_params(kind), n=2))
        return _Written(texts, trial.drafts.num_drafted, trial.drafts.num_sampled)

    def _compare(self, kind: str, texts: list[Text], which: range) -> tuple[Identity, Forced]:
        """which: the prompts that the texts complete."""
        reference = self._plain[kind][2 * which.start : 2 * which.stop]
        model = self._llm.target
        return compare_texts(model, reference, texts, self._noise), force(model, texts, self._noise)

    # --- distribution

    def _check_distribution(self, kind: str) -> None:
        self._progress("sampled texts")
        bets, written, drafted, sampled = self._sample(Subject(self._llm), self._num_tokens, _SHARE * self._budget)
        num_tokens = sum(len(text.output_ids) for text in written)
        share = bets.smallest_share("draft stands") if "draft stands" in bets.bets else None
        likeliest = bets.smallest_share("likeliest")
        self._checks.append(
            CheckResult(
                "distribution", kind, len(written), num_tokens, drafted, not bets.is_rejected,
                bets_line(bets), bets_odds(share, likeliest),
                {"log10_evidence": finite(bets.log_evidence),
                 "log10_limit": -math.log10(FALSE_ALARM), "num_impossible": bets.num_impossible,
                 "false_alarm": FALSE_ALARM, "smallest_unverified_share": share,
                 "smallest_likeliest_share": likeliest},
            )
        )  # fmt: skip
        self._queue(kind, _Written(written, drafted, sampled))

    def _sample(self, subject: Subject, num_tokens: int, seconds: float) -> tuple[Bets, list[Text], int, int]:
        """Round after round of texts, until there are num_tokens, or the time is up, or the bets are won.
        -> (the bets, the texts, draft tokens, those drawn from a law)"""
        started = time.perf_counter()
        trial = Trial(subject, self._seed)
        judge = self._judge()
        bets, texts = judge.new_bets(), list[Text]()
        prompts, n = self._round(num_tokens)
        params = replace(self._kind_params(SAMPLED), n=n)
        seen, turn = 0, 0
        while seen < num_tokens and not bets.is_rejected:
            # in turn, where a round has fewer prompts than there are
            some = [self._prompts[(turn + i) % len(self._prompts)] for i in range(prompts)]
            turn += prompts
            found = trial.write(some, params)
            judge.settle(bets, found)
            if not self._pairs and trial.drafts.num_sampled:
                self._pairs = self._telling_pairs(found, params)
            texts += [text._replace(firsts={}) for text in found]
            seen += sum(len(text.output_ids) for text in found)
            if time.perf_counter() - started > seconds:
                break
        return bets, texts, trial.drafts.num_drafted, trial.drafts.num_sampled

    def _telling_pairs(self, texts: list[Text], params: SamplingParams) -> list[Pair]:
        pairs = pairs_of(self._llm.target, texts, _CANDIDATES)
        half = _NUM_PAIRS // 2
        return narrowed([*telling(pairs, params, half), *telling(sharpened(pairs), params, half)], params, _NUM_IDS)

    def _judge(self) -> Judge:
        return Judge(self._llm.target, with_drafts=self._llm.method != "none", border=self._noise)

    def _round(self, num_tokens: int) -> tuple[int, int]:
        """(prompts, texts of each) of one round: an eighth of all tokens, and of the time for them."""
        wanted = min(num_tokens, _SHARE * self._budget * self._rate / 2) / _ROUNDS / self._len
        prompts = max(1, min(len(self._prompts), int(wanted / 2)))
        return prompts, 2 * max(1, int(wanted / 2 / prompts))

    # --- the verifier alone

    def _check_draws(self, kind: str) -> None:
        if not self._pairs:
            self._left_out.append(
                "verification of drawn drafts: none was drawn from a law, so that ids are only compared"
            )
            return
        self._progress("draws")
        bets, draws = self._draw(Subject(self._llm), _DRAWN_PER_TOKEN * self._num_tokens, _SHARE / 2 * self._budget)
        self._checks.append(
            CheckResult(
                "verification", kind, draws.num_steps, draws.num_tokens, draws.num_drafted, not bets.is_rejected,
                bets_line(bets), bets_odds(None, None),
                {"log10_evidence": finite(bets.log_evidence), "log10_limit": -math.log10(FALSE_ALARM),
                 "num_impossible": bets.num_impossible, "false_alarm": FALSE_ALARM},
            )
        )  # fmt: skip
        self._queue(kind, _Written([], draws.num_drafted, draws.num_drafted))

    def _draw(self, subject: Subject, num_tokens: int, seconds: float) -> tuple[Bets, Draws]:
        """The same for the verifier alone."""
        started = time.perf_counter()
        params = self._kind_params(SAMPLED)
        draws, bets = Draws(self._pairs, params, self._gamma, subject.verifier, self._seed), Draws.new_bets()
        while draws.num_tokens < num_tokens and not bets.is_rejected and time.perf_counter() - started < seconds:
            draws.settle(bets)
        return bets, draws

    # --- controls

    def _queue(self, kind: str, written: _Written) -> None:
        rule = self._kind_params(kind).verifier
        found = applying(
            kind,
            num_drafted=written.num_drafted,
            num_sampled=written.num_sampled,
            is_block=rule == "block" and self._gamma > 1,
        )
        self._pending += [(control, kind) for control in found]
        if not written.num_drafted:
            self._left_out.append(f"controls of drafts in {kind} texts: nothing was drafted")

    def _run_control(self, control: Control, kind: str, num_left: int) -> None:
        llm = self._llm
        subject = Subject(llm, control.verifier, control.target(llm.target) if control.target else None)
        # as long as the test of the real verifier took, while there is time; never less than its part of what is left
        seconds = max(min(self._seconds[kind], self._time_left), self._time_left / num_left, 0.02 * self._budget)
        run = self._control_by_bets if kind in (SAMPLED, DRAWN) else self._control_by_identity
        self._controls.append(run(control, kind, subject, seconds))

    def _control_by_identity(self, control: Control, kind: str, subject: Subject, seconds: float) -> ControlResult:
        started, seen, by = time.perf_counter(), 0, None
        for first in range(0, len(self._prompts), _CHUNK):
            which = range(first, min(first + _CHUNK, len(self._prompts)))
            written = self._write_drafted(subject, kind, which)
            found, forced = self._compare(kind, written.texts, which)
            seen += written.num_tokens
            by = _rejected_by(found, forced)
            if by or time.perf_counter() - started > seconds:
                break
        return ControlResult(control.name, control.says, kind, by is not None, by, seen, None)

    def _control_by_bets(self, control: Control, kind: str, subject: Subject, seconds: float) -> ControlResult:
        real = next(check for check in self._checks if check.kind == kind)
        if kind == DRAWN:
            bets, draws = self._draw(subject, real.num_tokens, seconds)
            seen = draws.num_tokens
        else:
            bets, texts, _, _ = self._sample(subject, real.num_tokens, seconds)
            seen = sum(len(text.output_ids) for text in texts)
        by = real.name if bets.is_rejected else None
        power = bets.power_at(real.num_tokens / max(seen, 1))
        return ControlResult(control.name, control.says, kind, by is not None, by, seen, power)

    def _certificate(self) -> Certificate:
        verdict, reason = verdict_of(self._checks, self._controls)
        powers = [control.power for control in self._controls if control.power is not None]
        return Certificate(
            verdict=verdict,
            reason=reason,
            method=self._llm.method,
            speculative_tokens=self._gamma,
            temperature=float(self._params.temperature or 0.0),
            seed=self._seed,
            row_exact=self._llm.target.traits.row_exact,
            tie=2 * self._noise,
            num_prompts=len(self._prompts),
            seconds=time.perf_counter() - self._started,
            false_alarm=0.0 if self._params.is_greedy else FALSE_ALARM,
            power=min(powers) if powers else None,
            checks=self._checks,
            controls=self._controls,
            left_out=self._left_out,
        )


def _rejected_by(found: Identity, forced: Forced) -> str | None:
    """Both tests where both did."""
    names = [("identity", found.num_different), ("teacher-forced", forced.num_wrong)]
    return ", ".join(name for name, bad in names if bad) or None
