"""Token counts and metrics of a response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from foredraft.engine.stats import SpeculationStats
from foredraft.server.wire.models import ResponseModel
from foredraft.text.outputs import Delta, RequestMetrics, RequestOutput, SpeculativeDecodingMetrics
from foredraft.text.request import Request


class PromptTokensDetails(ResponseModel):
    """cached_tokens: prompt tokens whose keys and values came from the prefix cache."""

    cached_tokens: int


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """The token counts of all prompts of a body, added up."""
    return _usage(
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(text.token_ids) for output in outputs for text in output.outputs),
        num_cached_tokens=sum(output.metrics.num_cached_tokens for output in outputs),
    )


def _usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
    )


class RunningUsage:
    """Counts the tokens of all texts of a body while they are streamed."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._num_output_tokens = 0

    def add(self, delta: Delta) -> None:
        self._num_output_tokens += len(delta.token_ids)

    def attach(self, chunks: Sequence[ResponseModel]) -> list[ResponseModel]:
        """Copies of the chunks, with the usage so far in each."""
        usage = _usage(
            num_prompt_tokens=sum(len(request.prompt_ids) for request in self._requests),
            num_output_tokens=self._num_output_tokens,
            num_cached_tokens=sum(request.sequences[0].num_cached for request in self._requests if request.texts),
        )
        return [chunk.model_copy(update={"usage": usage}) for chunk in chunks]


def metrics_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The metrics of all prompts together: counts are added up; the time in the queue and the time to the first token are the
    shortest ones. Inter-token latency and tokens per second are reported for a single prompt only."""
    all_metrics = [output.metrics for output in outputs]
    return asdict(all_metrics[0] if len(all_metrics) == 1 else _merged(all_metrics))


def _merged(all_metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    stats = sum((metrics.stats for metrics in all_metrics), SpeculationStats())
    return replace(
        all_metrics[0],
        time_in_queue=_shortest(metrics.time_in_queue for metrics in all_metrics),
        time_to_first_token=_shortest(metrics.time_to_first_token for metrics in all_metrics),
        inter_token_latency=None,
        tokens_per_second=None,
        num_preemptions=sum(metrics.num_preemptions for metrics in all_metrics),
        num_cached_tokens=sum(metrics.num_cached_tokens for metrics in all_metrics),
        speculative_decoding=SpeculativeDecodingMetrics.of(stats),
        stats=stats,
    )


def _shortest(times: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    return min((time for time in times if time is not None), default=None)
