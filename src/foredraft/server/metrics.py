"""What Prometheus is told: vLLM's names under foredraft:, and a few of our own. A registry of its own, no global state."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foredraft.engine.step import Step
from foredraft.llm import LLM
from foredraft.text.outputs import Delta, RequestOutput

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Everything that /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to the first token of each text", _FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "From one delivery of a text to the next, which may hold several tokens",
            _BETWEEN,
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time of a text's tokens behind the first", _BETWEEN
        )
        self.whole_time = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", _WHOLE
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Until the engine began to read a prompt", _FIRST_TOKEN
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a prompt", _NUM_TOKENS)
        self.request_generation_tokens = self._histogram("request_generation_tokens", "Tokens of a text", _NUM_TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts of requests that were finished")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were delivered")
        self.success = self._counter("request_success", "Texts that were finished", "finished_reason")
        self.preemptions = self._counter("num_preemptions", "Times that a text gave its memory up and began again")
        self.aborted = self._counter("request_aborted", "Requests that did not come to their end", "reason")
        self.http = self._counter("http_requests", "Answers", "route", "status")

    @contextmanager
    def watching(self, llm: LLM) -> Iterator[None]:
        """Show this engine's state meanwhile, and look on at its steps."""
        steps = _Steps(llm)
        state = _EngineState(llm, steps)
        llm.engine.observers.append(steps)
        self.registry.register(state)
        try:
            yield
        finally:
            self.registry.unregister(state)
            llm.engine.observers.remove(steps)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def timer(self) -> RequestTimer:
        return RequestTimer(self)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"foredraft:{name}", what, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"foredraft:{name}", what, labels, registry=self.registry)


class RequestTimer:
    """The times of one request, from now on."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}

    def delivered(self, batch: Sequence[tuple[int, Delta]]) -> None:
        """What came of its texts just now."""
        now, metrics = time.perf_counter(), self._metrics
        for place, delta in batch:
            text = place, delta.index
            if text in self._last:
                metrics.inter_token_latency.observe(now - self._last[text])
            else:
                metrics.time_to_first_token.observe(now - self._arrived)
            self._last[text] = now
            metrics.generation_tokens.inc(len(delta.token_ids))

    def finished(self, outputs: Sequence[RequestOutput]) -> None:
        metrics = self._metrics
        metrics.whole_time.observe(time.perf_counter() - self._arrived)
        for output in outputs:
            metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            metrics.request_prompt_tokens.observe(len(output.prompt_token_ids))
            metrics.preemptions.inc(output.metrics.num_preemptions)
            if output.metrics.time_in_queue is not None:
                metrics.queue_time.observe(output.metrics.time_in_queue)
            if output.metrics.inter_token_latency is not None:
                metrics.time_per_output_token.observe(output.metrics.inter_token_latency)
            for text in output.outputs:
                metrics.request_generation_tokens.observe(len(text.token_ids))
                metrics.success.labels(text.finish_reason).inc()

    def aborted(self, reason: str) -> None:
        self._metrics.aborted.labels(reason).inc()


class _Steps:
    """Looks on, and keeps counts and what was asked last. Written by the engine's thread only."""

    def __init__(self, llm: LLM) -> None:
        self.num_steps = Counts[str]()
        self.seconds = dict.fromkeys(("draft", "read", "verify", "other"), 0.0)
        self.asked: dict[str, list[int]] = {name: [] for name in llm.drafters}
        """Of the last step that wrote: the draft tokens that each drafter was asked for, text by text."""
        self.num_scoring = 0

    def observe(self, step: Step) -> None:
        asked: dict[str, list[int]] = {name: [] for name in self.asked}
        for item in step.scoring:
            if item.max_draft and item.drafter in asked:
                asked[item.drafter].append(item.max_draft)
        drafted = any(asked.values())
        if step.scoring:
            self.asked, self.num_scoring = asked, len(step.scoring)
        self.num_steps["drafted" if drafted else "plain"] += 1
        other = step.total_time - step.draft_time - step.read_time - step.verify_time
        for part, seconds in (
            ("draft", step.draft_time),
            ("read", step.read_time),
            ("verify", step.verify_time),
            ("other", max(other, 0.0)),
        ):
            self.seconds[part] += seconds


class _EngineState(Collector):
    """What the engine counts anyway, read when somebody asks."""

    def __init__(self, llm: LLM, steps: _Steps) -> None:
        self._llm = llm
        self._steps = steps

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._speculation()
        yield from self._choice()

    def _load(self) -> Iterator[Metric]:
        engine = self._llm.engine
        yield _gauge("num_requests_running", "Texts that are being written", engine.num_running)
        yield _gauge("num_requests_waiting", "Texts that wait", engine.num_waiting)
        pool = engine.pool
        retained = pool.bytes_retained
        yield _gauge(
            "kv_cache_usage_perc",
            "Share of the cache memory that is taken; 1 is all. What is kept for later prompts is free",
            (pool.used - retained) / pool.total,
        )
        yield _gauge("kv_cache_total_bytes", "The cache memory, drafts' included", pool.total)
        yield _gauge("kv_cache_retained_bytes", "Cache memory that is kept for prompts that begin alike", retained)
        for name, whose, stats in (
            ("prefix_cache", "", engine.prefix_stats),
            ("draft_prefix_cache", ", in drafts", engine.draft_prefix_stats),
        ):
            yield _counter(f"{name}_queries", f"Tokens of prompts that were looked up{whose}", stats.num_asked_tokens)
            yield _counter(f"{name}_hits", f"Those whose keys and values were there{whose}", stats.num_found_tokens)

    def _speculation(self) -> Iterator[Metric]:
        stats = self._llm.engine.stats
        yield _counter("spec_decode_num_drafts", "Drafts that were verified", stats.num_spec_steps)
        yield _counter("spec_decode_num_draft_tokens", "Draft tokens that were verified", stats.num_draft_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Draft tokens that stood", stats.num_accepted_tokens)
        yield _labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that stood, by their place in the draft",
            ("position",),
            {(str(place),): count for place, count in enumerate(stats.accepted_per_position)},
        )
        yield _counter(
            "spec_decode_num_evaluated_tokens",
            "Draft tokens that stood or were the first of their draft that did not",
            stats.num_evaluated_tokens,
        )
        yield _counter("spec_decode_num_emitted_tokens", "Tokens that verification wrote", stats.num_emitted_tokens)
        yield _counter("spec_decode_num_verified_rows", "Texts verified, step by step", stats.num_steps)

    def _choice(self) -> Iterator[Metric]:
        steps, asked, num_scoring = self._steps, self._steps.asked, max(self._steps.num_scoring, 1)
        yield _gauge(
            "spec_decode_gamma",
            "Draft tokens asked for each text in the last step: the controller's current choice, 0 where it is off",
            sum(map(sum, asked.values())) / num_scoring,
        )
        share = GaugeMetricFamily(
            "foredraft:spec_decode_drafter",
            "Share of the texts of the last step that each drafter drafts for",
            labels=["drafter"],
        )
        for name, depths in asked.items():
            share.add_metric([name], len(depths) / num_scoring)
        yield share
        yield _labelled_counter(
            "spec_decode_fallbacks",
            "Times that a drafter was left alone that had drafted",
            ("drafter", "reason"),
            dict(self._llm.fallbacks),
        )
        by_kind = {(kind,): float(steps.num_steps[kind]) for kind in ("drafted", "plain")}
        yield _labelled_counter("engine_steps", "Steps, with drafts or without", ("kind",), by_kind)
        by_part = {(part,): seconds for part, seconds in steps.seconds.items()}
        yield _labelled_counter("engine_step_seconds", "Time of the steps, by what took it", ("part",), by_part)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"foredraft:{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"foredraft:{name}", what, value=value)


def _labelled_counter(name: str, what: str, labels: Sequence[str], values: dict[Any, float]) -> Metric:
    found = CounterMetricFamily(f"foredraft:{name}", what, labels=labels)
    for of, value in values.items():
        found.add_metric(list(of), value)
    return found
