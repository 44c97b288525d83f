"""What a draft is worth for a target: acceptance on texts, τ on the target's own texts, and the speed that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foredraft.bench import Interval, Workload
from foredraft.bench.statistics import Samples, bootstrap
from foredraft.engine.stats import SpeculationStats
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.model import LanguageModel, Read
from foredraft.sampling import SamplingParams
from foredraft.sampling.token_probs import token_probs_under
from foredraft.text.tokenizing import encode_prompt
from foredraft.train.blocks import spread_places
from foredraft.train.expected import Expectation, expect, nothing
from foredraft.tune.measure import measure
from foredraft.tune.predict import Predictor

GREEDY = 0.0
_ROWS = 64
"""Rows whose laws are held together: a large vocabulary in all rows of a text would take gigabytes."""


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """Σ min(p, q) over the places of texts that somebody else wrote: sum and number. The target need not agree with them."""

    total: float
    num_places: int

    @property
    def mean(self) -> float:
        return self.total / self.num_places

    def __add__(self, other: TextAcceptance) -> TextAcceptance:
        return TextAcceptance(self.total + other.total, self.num_places + other.num_places)


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Texts that were asked for and that were measured: one for each document that is long enough, `num_too_short` of
    `num_documents` being not."""

    num_asked: int
    num_measured: int
    num_documents: int
    num_too_short: int

    @property
    def why_fewer(self) -> str | None:
        """In one line; None where as many were measured as were asked for."""
        if self.num_measured >= self.num_asked:
            return None
        found = f"{self.num_documents} document{'s' if self.num_documents > 1 else ''}"
        short = f", {self.num_too_short} of them too short" if self.num_too_short else ""
        return f"{self.num_measured} of {self.num_asked} texts were measured: there are {found}{short}"


@dataclass(frozen=True, slots=True)
class KindReport:
    """One kind of text at one temperature. expected: by γ. measured: by γ, what the engine did on the same prompts with
    rejection sampling; empty where that was not asked for.

    tau_intervals: by γ, 95 % over texts (bootstrap); None where there was one text only.
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
    """At one γ: seconds of a plain step, of a verification of γ + 1 rows, and of a draft of γ tokens."""

    gamma: int
    plain_seconds: float
    verify_seconds: float
    draft_seconds: float

    def speedup(self, tau: float) -> float:
        """Over plain decoding, at so many tokens per round."""
        return tau * self.plain_seconds / (self.verify_seconds + self.draft_seconds)


def acceptance_on(
    llm: LLM,
    ids: Sequence[int],
    temperature: float,
    *,
    first: int = 1,
    truncation: tuple[int, float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Teacher-forced, on the engine's own logits and under its own warps. ids: [N]. first: the first place to look at.

    truncation: top_k, top_p, min_p. -> for each place from `first` on, [N - first] float64: the acceptance of the token that
    stands there, min(1, q / p); and Σ min(p, q), of a token yet to be drawn.
    """
    draft = _draft_of(llm)
    vocab = min(llm.target.traits.vocab_size, draft.traits.vocab_size)
    ours, theirs = (_logits(model, ids, len(ids) - first)[:, :vocab] for model in (llm.target, draft))
    wanted = torch.tensor(ids[first:], device=ours.device)
    of_token, of_law = [], []
    for rows, drafted, tokens in zip(*(torch.split(x, _ROWS) for x in (ours, theirs, wanted)), strict=True):
        p, q = _laws(rows, temperature, truncation), _laws(drafted, temperature, truncation)
        at = tokens[:, None]
        of_token.append((q.gather(1, at) / p.gather(1, at)).nan_to_num(0.0, posinf=0.0).clamp(max=1.0)[:, 0])
        of_law.append(torch.minimum(p, q).sum(-1))
    return torch.cat(of_token).cpu(), torch.cat(of_law).cpu()


def _draft_of(llm: LLM) -> LanguageModel:
    if llm.draft is None:
        raise ForedraftError("there is no draft model to evaluate: give one")
    return llm.draft


def _logits(model: LanguageModel, ids: Sequence[int], count: int) -> Tensor:
    """Those after which the last `count` tokens come. -> [count, V]"""
    read = list(ids[:-1])
    return model.read([Read(0, read, count)], model.scratch_cache([len(read)]))


def _laws(logits: Tensor, temperature: float, truncation: tuple[int, float, float] | None) -> Tensor:
    """[R, V] float64; one-hot where greedy"""
    if temperature == GREEDY:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return token_probs_under(logits, [temperature] * len(logits), truncation).dense(logits.shape[-1]).double()


def evaluate(
    llm: LLM,
    texts: Mapping[str, Sequence[str]],
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
    """llm: the target with the draft model. texts: held-out documents by kind; of each, num_texts are begun with prompt_len
    tokens and written on by the target at each temperature. measures: run the draft on the same prompts as well.

    Raises ForedraftError where a kind has no document that is long enough.
    """
    plain = llm.with_drafter("none")
    found = []
    for number, (kind, documents) in enumerate(texts.items()):
        encoded, counts = _documents(llm, kind, documents, prompt_len, num_texts)
        for place, temperature in enumerate(temperatures):
            found.append(
                _one_kind(
                    llm, plain, kind, encoded, counts, temperature, gammas, prompt_len, max_tokens, measures, seed
                )
            )
            progress((number + (place + 1) / len(temperatures)) / len(texts))
    return found


def _documents(
    llm: LLM, kind: str, documents: Sequence[str], prompt_len: int, number: int
) -> tuple[list[list[int]], TextCounts]:
    """Evenly chosen among those that are long enough, and no longer than the context."""
    limit = llm.max_model_len
    encoded = [encode_prompt(llm.text_tokenizer, document)[:limit] for document in documents]
    encoded = [ids for ids in encoded if len(ids) > prompt_len]
    if not encoded:
        raise ForedraftError(f"{kind}: no document is longer than the {prompt_len} tokens that a text begins with")
    chosen = [encoded[place] for place in spread_places(len(encoded), number)]
    return chosen, TextCounts(number, len(chosen), len(documents), len(documents) - len(encoded))


def _one_kind(
    llm: LLM,
    plain: LLM,
    kind: str,
    documents: Sequence[Sequence[int]],
    counts: TextCounts,
    temperature: float,
    gammas: Sequence[int],
    prompt_len: int,
    max_tokens: int,
    measures: bool,
    seed: int,
) -> KindReport:
    prompts = [list(ids[:prompt_len]) for ids in documents]
    on_text = TextAcceptance(0.0, 0)
    for ids in documents:
        _, of_law = acceptance_on(llm, ids[: 2 * max_tokens], temperature)
        on_text += TextAcceptance(float(of_law.sum()), len(of_law))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    outputs = plain.generate(prompts, [replace(params, seed=seed + i) for i in range(len(prompts))])
    found: dict[int, list[Expectation]] = {gamma: [] for gamma in gammas}
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        of_token, _ = acceptance_on(llm, ids, temperature, first=len(prompt))
        for gamma in gammas:
            found[gamma].append(expect(of_token.tolist(), gamma))
    measured = {gamma: measured_tau(llm, prompts, params, gamma) for gamma in gammas} if measures else {}
    return KindReport(
        kind,
        temperature,
        counts,
        on_text,
        expected={gamma: sum(each, nothing(gamma)) for gamma, each in found.items()},
        tau_intervals={gamma: _tau_interval(each) for gamma, each in found.items()},
        measured=measured,
    )


def _tau_interval(texts: Sequence[Expectation]) -> Interval | None:
    """Of all tokens over all rounds, over the texts that might as well have been drawn."""
    samples = Samples.of([(one.num_tokens, one.num_rounds) for one in texts])
    return bootstrap(len(texts), samples.rate)


def measured_tau(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, gamma: int) -> float:
    """What the engine does, in tokens per target pass, with rejection sampling."""
    wanted = replace(params, speculative_tokens=gamma, verification=None if params.is_greedy else "rejection")
    outputs = llm.with_drafter("draft_model").generate([list(prompt) for prompt in prompts], wanted)
    stats = sum((output.metrics.stats for output in outputs), SpeculationStats())
    return stats.num_emitted_tokens / stats.num_steps


def predict_speed(
    llm: LLM, prompts: Sequence[str], params: SamplingParams, gammas: Sequence[int], *, budget: float
) -> list[SpeedPrediction]:
    """Measured costs of steps and drafts on this machine, at batch size 1; budget: seconds."""
    workload = Workload.of(list(prompts), "held-out beginnings")
    found = measure(
        llm, ["draft_model"], (1,), workload, params, most=max(gammas), budget=budget, progress=lambda _: None
    )
    predictor = Predictor(found.drafted("draft_model", 1))
    rounds = [one.seconds for trial in found.plain(1) for one in trial.rounds]
    plain = float(np.median(rounds))
    verify, draft = predictor.verify_curve(1, max(gammas)), predictor.draft_curve(1, max(gammas))
    return [SpeedPrediction(gamma, plain, verify[gamma], draft[gamma - 1]) for gamma in gammas]
