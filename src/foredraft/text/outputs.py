"""The outputs of requests, in the form of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.engine.sequence import Origin, TokenSequence
from foredraft.engine.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """logprob: of the raw distribution. rank: from 1, among the whole vocabulary. decoded_token: None without a tokenizer."""

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingMetrics:
    """The fields and definitions of vLLM's per-request record, over all n texts of the request.

    mean_acceptance_length: τ = 1 + accepted / steps with a draft; None if there was none. draft_acceptance_rate: accepted /
    drafted. conditional_acceptance: α = accepted / (accepted + first rejected). acceptance_histogram[j]: steps with a draft
    in which j draft tokens were accepted. num_steps: all verified rows, including those without a draft. num_near_ties:
    see SpeculationStats.
    """

    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    conditional_acceptance: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_steps: int
    num_near_ties: int

    @staticmethod
    def of(stats: SpeculationStats) -> SpeculativeDecodingMetrics:
        return SpeculativeDecodingMetrics(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            conditional_acceptance=stats.conditional_acceptance,
            acceptance_histogram=list(stats.acceptance_histogram),
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_tokens,
            num_steps=stats.num_steps,
            num_near_ties=stats.num_near_ties,
        )


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds, from the request's arrival; None until there is something to measure.

    time_in_queue: from arrival until the request first runs.
    inter_token_latency: mean time from one token to the next after the first. tokens_per_second: output tokens of all
    texts over the time from arrival to the last token. num_cached_tokens: prompt tokens whose keys and values were cached.
    stats: the underlying counts, which can be added up.
    """

    time_to_first_token: float | None
    inter_token_latency: float | None
    tokens_per_second: float | None
    num_preemptions: int
    num_cached_tokens: int
    speculative_decoding: SpeculativeDecodingMetrics
    stats: SpeculationStats
    time_in_queue: float | None = None

    @staticmethod
    def of(sequences: Sequence[TokenSequence]) -> RequestMetrics:
        """Over all sequences of one request."""
        arrived_at = min((s.arrived_at for s in sequences), default=0.0)
        begun_at = [s.begun_at for s in sequences if s.begun_at is not None]
        spans = [(s.first_token_at, s.last_token_at) for s in sequences]
        written = [(first, last) for first, last in spans if first is not None and last is not None]
        num_output = sum(s.num_output for s in sequences)
        num_gaps = num_output - len(written)
        stats = sum((s.stats for s in sequences), SpeculationStats())
        return RequestMetrics(
            time_to_first_token=min(first for first, _ in written) - arrived_at if written else None,
            inter_token_latency=sum(last - first for first, last in written) / num_gaps if num_gaps else None,
            tokens_per_second=num_output / (max(last for _, last in written) - arrived_at) if written else None,
            num_preemptions=sum(s.num_preemptions for s in sequences),
            num_cached_tokens=sequences[0].num_cached if sequences else 0,
            speculative_decoding=SpeculativeDecodingMetrics.of(stats),
            stats=stats,
            time_in_queue=min(begun_at) - arrived_at if begun_at else None,
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One text. finish_reason: "stop", "length", "abort", "error", or None while it runs. stop_reason: the stop string or
    stop token id that ended it, None for an end-of-sequence token. origins: where each token came from. text_offsets: where each
    token begins in the text, in characters, if log probabilities were requested."""

    index: int
    text: str
    token_ids: list[int]
    origins: list[Origin]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None
    text_offsets: list[int] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's texts so far. prompt: None if ids were given. prompt_logprobs[0] is None: nothing precedes the first token.
    prompt_text_offsets: where each token begins in the prompt's text, in characters, if prompt_logprobs were requested."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_text_offsets: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What was added to one text of a streamed request since its last delta. text may be empty while a character is incomplete.

    finish_reason, stop_reason: set in the last delta of the text. output: of the whole request, in its last delta. logprobs,
    text_offsets: of these tokens, if log probabilities were requested; the offsets are those in the whole text.
    """

    index: int
    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: str | None = None
    output: RequestOutput | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    stop_reason: int | str | None = None
    text_offsets: list[int] | None = None
