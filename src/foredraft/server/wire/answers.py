"""What the answers of both ways of writing share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from uuid import uuid4

from foredraft.engine.stats import SpeculationStats
from foredraft.server.wire.base import Answer
from foredraft.server.wire.errors import ErrorBody, ErrorDetail
from foredraft.server.wire.sampling import SamplingFields
from foredraft.text.outputs import Delta, Logprob, RequestMetrics, RequestOutput, SpeculativeDecodingMetrics
from foredraft.text.request import Request

_LEAST = -9999.0
"""OpenAI's for a token that cannot be."""

PromptLogprobs = list[dict[int, dict[str, Any]] | None]


class PromptTokensDetails(Answer):
    """cached_tokens: whose keys and values had been read for others."""

    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer begins with. created: in seconds since 1970."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, kind: str, model: str, request_id: str | None = None) -> Head:
        return cls(f"{kind}-{request_id or uuid4().hex}", model)


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_written = sum(len(text.token_ids) for output in outputs for text in output.outputs)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_written,
        total_tokens=num_prompt + num_written,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(output.metrics.num_cached_tokens for output in outputs)
        ),
    )


class RunningUsage:
    """The numbers of tokens so far, of all texts of a body."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._num_written = 0

    def take(self, delta: Delta) -> None:
        self._num_written += len(delta.token_ids)

    def on(self, chunks: Sequence[Answer]) -> list[Answer]:
        """The same chunks, with the usage in each."""
        num_prompt = sum(len(request.prompt_ids) for request in self._requests)
        usage = Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_written,
            total_tokens=num_prompt + self._num_written,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(request.sequences[0].num_cached for request in self._requests if request.texts)
            ),
        )
        return [chunk.model_copy(update={"usage": usage}) for chunk in chunks]


class Answers(ABC):
    """The answer to one body, whole or in chunks."""

    def __init__(self, body: SamplingFields, head: Head) -> None:
        self._head = head
        self._includes_usage, self._includes_metrics = body.includes_usage, bool(body.metrics)

    end = b"data: [DONE]\n\n"
    """Behind the last event of a stream that went well."""

    def first(self) -> list[Answer]:
        """Before any text is there."""
        return []

    def failed(self, error: ErrorDetail) -> list[Answer]:
        """The last events of a stream that has begun."""
        return [ErrorBody(error=error)]

    def event(self, chunk: Answer) -> bytes:
        """As a server-sent event."""
        return b"data: " + chunk.model_dump_json().encode() + b"\n\n"

    def last(self, outputs: Sequence[RequestOutput]) -> list[Answer]:
        """The chunk behind the texts, where it was asked for."""
        usage, metrics = usage_of(outputs) if self._includes_usage else None, self._metrics(outputs)
        return [self._tail(usage, metrics)] if usage or metrics else []

    @abstractmethod
    def _tail(self, usage: Usage | None, metrics: dict[str, Any] | None) -> Answer:
        """A chunk without texts."""

    def _metrics(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """Where they were asked for."""
        return metrics_of(outputs) if self._includes_metrics else None


def metrics_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of all prompts together: counts are added up, and the first token is the first of any. What cannot be added up is
    given for a single prompt only."""
    all_metrics = [output.metrics for output in outputs]
    return asdict(all_metrics[0] if len(all_metrics) == 1 else _merged(all_metrics))


def _merged(all_metrics: Sequence[RequestMetrics]) -> RequestMetrics:
    stats = sum((metrics.stats for metrics in all_metrics), SpeculationStats())
    firsts = [m.time_to_first_token for m in all_metrics if m.time_to_first_token is not None]
    return replace(
        all_metrics[0],
        time_to_first_token=min(firsts, default=None),
        inter_token_latency=None,
        tokens_per_second=None,
        num_preemptions=sum(metrics.num_preemptions for metrics in all_metrics),
        num_cached_tokens=sum(metrics.num_cached_tokens for metrics in all_metrics),
        speculative_decoding=SpeculativeDecodingMetrics.of(stats),
        stats=stats,
    )


def prompt_logprobs_of(output: RequestOutput) -> PromptLogprobs | None:
    """vLLM's form: by token id; nothing precedes the first token."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if one is None else {token: asdict(entry) | {"logprob": logprob_of(entry)} for token, entry in one.items()}
        for one in output.prompt_logprobs
    ]


def own_and_top(entries: dict[int, Logprob], num_top: int) -> tuple[Logprob, list[Logprob]]:
    """The token's own entry, which comes first, and the num_top most likely ones."""
    by_rank = sorted(entries.values(), key=lambda entry: entry.rank or 0)
    return next(iter(entries.values())), by_rank[:num_top]


def logprob_of(entry: Logprob) -> float:
    """JSON has no infinity."""
    return max(entry.logprob, _LEAST)


def text_of(entry: Logprob) -> str:
    return entry.decoded_token or ""


def bytes_of(text: str) -> list[int] | None:
    """None where the token is only a part of a character."""
    return None if "\ufffd" in text else list(text.encode())
