"""Evaluates a draft for a target: its acceptance on texts, τ on the target's own texts, and the predicted speedup."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foredraft.bench import Interval, Workload
from foredraft.bench.statistics import Samples, bootstrap
from foredraft.engine.stats import SpeculationStats
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.train.blocks import spread_indices
from foredraft.train.expected import Expectation, expect
from foredraft.train.held_out import HeldOutDocument, HeldOutText, held_out_text
from foredraft.train.text_acceptance import Draft, TextAcceptance, acceptance_on, draft_of, drafter_of
from foredraft.tune.measure import measure
from foredraft.tune.predict import Predictor


@dataclass(frozen=True, slots=True)
class TextCounts:
    """How many texts were asked for and measured. Every document that is long enough gives one text; num_too_short of the
    num_documents are too short."""

    num_asked: int
    num_measured: int
    num_documents: int
    num_too_short: int

    @property
    def shortfall(self) -> str | None:
        """Why fewer texts were measured than asked for, in one line; None if all were."""
        if self.num_measured >= self.num_asked:
            return None
        documents = "is 1 document" if self.num_documents == 1 else f"are {self.num_documents} documents"
        short = f", {self.num_too_short} of them too short" if self.num_too_short else ""
        return f"{self.num_measured} of {self.num_asked} texts were measured: there {documents}{short}"


@dataclass(frozen=True, slots=True)
class KindReport:
    """One kind of text at one temperature. expected: by γ. measured: by γ, the engine's τ on the same prompts with rejection
    sampling; empty if not requested.

    tau_intervals: by γ, 95 % over texts (bootstrap); None if there was only one text.
    """

    kind: str
    temperature: float
    texts: TextCounts
    on_text: TextAcceptance
    expected: dict[int, Expectation]
    tau_intervals: dict[int, Interval | None]
    measured: dict[int, float]


@dataclass(frozen=True, slots=True)
class SpeedPrediction:
    """At one γ: the seconds of a plain step, of verifying γ + 1 rows, and of drafting γ tokens."""

    gamma: int
    plain_seconds: float
    verify_seconds: float
    draft_seconds: float

    def speedup(self, tau: float) -> float:
        """The speedup over plain decoding. tau: tokens per target pass."""
        return tau * self.plain_seconds / (self.verify_seconds + self.draft_seconds)


def evaluate(
    llm: LLM,
    texts: Mapping[str, Sequence[HeldOutDocument]],
    temperatures: Sequence[float],
    gammas: Sequence[int],
    *,
    num_texts: int,
    prompt_len: int = 24,
    max_tokens: int = 128,
    measures: bool = False,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> list[KindReport]:
    """llm: the target with the draft model or the head. texts: held-out documents by kind, pairs for an encoder-decoder. Of num_texts
    documents of each kind, the first prompt_len tokens (or the source) are the prompt, which the target continues or answers at each
    temperature. measures: whether to also run the draft on the same prompts.

    Raises ForedraftError if a kind has no document that is long enough, and if the documents are texts but the target needs pairs,
    or the reverse.
    """
    draft = draft_of(llm)
    evaluation = _Evaluation(llm, llm.with_drafter("none"), draft, gammas, prompt_len, max_tokens, measures, seed)
    reports = []
    for number, (kind, documents) in enumerate(texts.items()):
        encoded, counts = evaluation.encode(kind, documents, num_texts)
        for index, temperature in enumerate(temperatures):
            reports.append(evaluation.report(kind, encoded, counts, temperature))
            progress((number + (index + 1) / len(temperatures)) / len(texts))
    return reports


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """See evaluate. plain: the target without a drafter. draft: what the LLM drafts with."""

    llm: LLM
    plain: LLM
    draft: Draft
    gammas: Sequence[int]
    prompt_len: int
    max_tokens: int
    measures: bool
    seed: int

    def encode(
        self, kind: str, documents: Sequence[HeldOutDocument], num_texts: int
    ) -> tuple[list[HeldOutText], TextCounts]:
        """Encode documents evenly spread among those that are long enough."""
        found = [held_out_text(self.llm, document, self.prompt_len) for document in documents]
        encoded = [text for text in found if text is not None]
        if not encoded:
            raise ForedraftError(
                f"{kind}: no document is long enough: a text must be longer than its prompt of {self.prompt_len} tokens, "
                "and the text of a pair longer than one token"
            )
        chosen = [encoded[index] for index in spread_indices(len(encoded), num_texts)]
        return chosen, TextCounts(num_texts, len(chosen), len(documents), len(documents) - len(encoded))

    def report(self, kind: str, texts: Sequence[HeldOutText], counts: TextCounts, temperature: float) -> KindReport:
        prompts = [text.prompt for text in texts]
        params = SamplingParams(temperature=temperature, max_tokens=self.max_tokens)
        on_text = self._on_text(texts, temperature)
        expectations = self._expectations(prompts, params, temperature)
        measured = {g: measured_tau(self.llm, prompts, params, g) for g in self.gammas} if self.measures else {}
        return KindReport(
            kind,
            temperature,
            counts,
            on_text,
            expected={gamma: sum(of_texts, Expectation.zero(gamma)) for gamma, of_texts in expectations.items()},
            tau_intervals={gamma: _tau_interval(of_texts) for gamma, of_texts in expectations.items()},
            measured=measured,
        )

    def _on_text(self, texts: Sequence[HeldOutText], temperature: float) -> TextAcceptance:
        acceptance = TextAcceptance(0.0, 0)
        for text in texts:
            first = text.num_given if self.draft.drafts_first else text.num_given + 1
            ids = text.ids[: 2 * self.max_tokens]
            _, (of_draws, *_) = acceptance_on(
                self.llm.target, self.draft, ids, temperature, first=first, source=text.source
            )
            acceptance += TextAcceptance(float(of_draws.sum()), len(of_draws))
        return acceptance

    def _expectations(
        self, prompts: list[list[int]], params: SamplingParams, temperature: float
    ) -> dict[int, list[Expectation]]:
        """By γ, the expectations of the texts that the target writes from the prompts."""
        seeded = [replace(params, seed=self.seed + i) for i in range(len(prompts))]
        outputs = self.plain.generate(prompts, seeded)
        expectations: dict[int, list[Expectation]] = {gamma: [] for gamma in self.gammas}
        for prompt, output in zip(prompts, outputs, strict=True):
            source, given = self.llm.target.inputs_for(prompt)
            ids, depth = [*given, *output.outputs[0].token_ids], max(self.gammas)
            of_tokens, _ = acceptance_on(
                self.llm.target, self.draft, ids, temperature, first=len(given), depth=depth, source=source
            )
            for gamma in self.gammas:
                expectations[gamma].append(
                    expect(of_tokens.numpy(), gamma, num_undrafted=0 if self.draft.drafts_first else 1)
                )
        return expectations


def _tau_interval(texts: Sequence[Expectation]) -> Interval | None:
    """The interval of all tokens over all rounds, by resampling the texts."""
    samples = Samples.of([(text.num_tokens, text.num_rounds) for text in texts])
    return bootstrap(len(texts), samples.rate)


def measured_tau(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, gamma: int) -> float:
    """The engine's tokens per target pass, with rejection sampling."""
    params = replace(params, speculative_tokens=gamma, verification=None if params.is_greedy else "rejection")
    outputs = llm.with_drafter(drafter_of(llm)).generate([list(prompt) for prompt in prompts], params)
    stats = sum((output.metrics.stats for output in outputs), SpeculationStats())
    return stats.num_emitted_tokens / stats.num_steps


def predict_speed(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, gammas: Sequence[int], *, budget: float
) -> list[SpeedPrediction]:
    """Predict speeds at batch size 1 from the measured costs of steps and drafts on this machine. budget: seconds."""
    workload = Workload.of(list(prompts), "held-out beginnings")
    runs = measure(
        llm, [drafter_of(llm)], (1,), workload, params, most=max(gammas), budget=budget, progress=lambda _: None
    )
    predictor = Predictor(runs.drafted(drafter_of(llm), 1))
    plain = float(np.median([step.seconds for trial in runs.plain(1) for step in trial.rounds]))
    verify, draft = predictor.verify_curve(1, max(gammas)), predictor.draft_curve(1, max(gammas))
    return [SpeedPrediction(gamma, plain, verify[gamma], draft[gamma - 1]) for gamma in gammas]
