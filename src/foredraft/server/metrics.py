"""Prometheus metrics: vLLM's names with the prefix "foredraft:", and a few of our own. They use no global registry."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from foredraft.llm import LLM
from foredraft.server.engine_metrics import EngineCollector, StepCounter
from foredraft.text.outputs import Delta, RequestOutput

_FIRST_TOKEN_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_INTER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to the first token of each text",
            _FIRST_TOKEN_SECONDS,
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Time between two deliveries of a text, which may have several tokens each",
            _INTER_TOKEN_SECONDS,
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a text's tokens after the first",
            _INTER_TOKEN_SECONDS,
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", _REQUEST_SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time until the engine started to read a prompt", _FIRST_TOKEN_SECONDS
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _NUM_TOKENS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Tokens of a text", _NUM_TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self.generation_tokens = self._counter("generation_tokens", "Delivered tokens")
        self.success = self._counter("request_success", "Finished texts", "finished_reason")
        self.aborted = self._counter("request_aborted", "Requests that did not finish", "reason")
        self.http = self._counter("http_requests", "HTTP responses", "route", "status")

    @contextmanager
    def observing(self, llm: LLM) -> Iterator[None]:
        """Observe an engine inside the block, and include its metrics."""
        steps = StepCounter(llm)
        state = EngineCollector(llm, steps)
        llm.engine.observers.append(steps)
        self.registry.register(state)
        try:
            yield
        finally:
            self.registry.unregister(state)
            llm.engine.observers.remove(steps)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def timer(self) -> RequestTimer:
        return RequestTimer(self)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"foredraft:{name}", help_text, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"foredraft:{name}", help_text, labels, registry=self.registry)


class RequestTimer:
    """Measures one request from its arrival, which is when the timer is created."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived_at = time.perf_counter()
        self._last_delivery: dict[tuple[int, int], float] = {}

    def delivered(self, batch: Sequence[tuple[int, Delta]]) -> None:
        """Record deltas that just arrived, each with the index of its prompt."""
        now, metrics = time.perf_counter(), self._metrics
        for prompt_index, delta in batch:
            if not delta.token_ids:  # the end of a text, perhaps one without tokens
                continue
            text = prompt_index, delta.index
            if text in self._last_delivery:
                metrics.inter_token_latency.observe(now - self._last_delivery[text])
            else:
                metrics.time_to_first_token.observe(now - self._arrived_at)
            self._last_delivery[text] = now
            metrics.generation_tokens.inc(len(delta.token_ids))

    def finished(self, outputs: Sequence[RequestOutput]) -> None:
        """Record the end of the request."""
        metrics = self._metrics
        metrics.request_latency.observe(time.perf_counter() - self._arrived_at)
        for output in outputs:
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            metrics.request_prompt_tokens.observe(len(output.prompt_token_ids))
            if output.metrics.time_in_queue is not None:
                metrics.queue_time.observe(output.metrics.time_in_queue)
            if output.metrics.inter_token_latency is not None:
                metrics.time_per_output_token.observe(output.metrics.inter_token_latency)
            for text in output.outputs:
                metrics.request_generation_tokens.observe(len(text.token_ids))
                metrics.success.labels(text.finish_reason).inc()

    def aborted(self, reason: str) -> None:
        self._metrics.aborted.labels(reason).inc()
