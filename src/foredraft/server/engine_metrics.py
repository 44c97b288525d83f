"""Metrics of the engine's load and of speculative decoding, read when /metrics is requested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foredraft.engine.step import Step
from foredraft.llm import LLM


class StepCounter:
    """Observes the engine's steps. Only the engine's thread writes to it."""

    def __init__(self, llm: LLM) -> None:
        self.num_steps = Counter[str]()
        self.seconds = dict.fromkeys(("draft", "read", "verify", "other"), 0.0)
        self.asked: dict[str, list[int]] = {name: [] for name in llm.drafters}
        """By drafter, the number of draft tokens requested for each text, in the last step that generated tokens."""
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


class EngineCollector(Collector):
    """Reads the engine's own counts."""

    def __init__(self, llm: LLM, steps: StepCounter) -> None:
        self._llm = llm
        self._steps = steps

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._speculation()
        yield from self._decisions()

    def _load(self) -> Iterator[Metric]:
        engine = self._llm.engine
        yield _gauge("num_requests_running", "Running texts", engine.num_running)
        yield _gauge("num_requests_waiting", "Waiting texts", engine.num_waiting)
        yield _counter("num_preemptions", "Times that a text was preempted and restarted", engine.num_preemptions)
        pool = engine.pool
        retained = pool.bytes_retained
        yield _gauge(
            "kv_cache_usage_perc",
            "Share of the cache memory in use, from 0 to 1; memory retained for later prompts counts as free",
            (pool.used - retained) / pool.total,
        )
        yield _gauge("kv_cache_total_bytes", "Cache memory, including that of draft models", pool.total)
        yield _gauge("kv_cache_retained_bytes", "Cache memory retained for prompts with a common prefix", retained)
        for name, suffix, stats in (
            ("prefix_cache", "", engine.prefix_stats),
            ("draft_prefix_cache", ", draft model", engine.draft_prefix_stats),
        ):
            yield _counter(
                f"{name}_queries", f"Prompt tokens looked up in the prefix cache{suffix}", stats.num_asked_tokens
            )
            yield _counter(f"{name}_hits", f"Prompt tokens found in the prefix cache{suffix}", stats.num_found_tokens)

    def _speculation(self) -> Iterator[Metric]:
        stats = self._llm.engine.stats
        yield _counter("spec_decode_num_drafts", "Verified drafts", stats.num_spec_steps)
        yield _counter("spec_decode_num_draft_tokens", "Verified draft tokens", stats.num_draft_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Accepted draft tokens", stats.num_accepted_tokens)
        yield _labelled_counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft",
            ("position",),
            {(str(place),): count for place, count in enumerate(stats.accepted_per_position)},
        )
        yield _counter(
            "spec_decode_num_evaluated_tokens",
            "Draft tokens that were accepted or were the first rejected one of their draft",
            stats.num_evaluated_tokens,
        )
        yield _counter("spec_decode_num_emitted_tokens", "Tokens emitted by verification", stats.num_emitted_tokens)
        yield _counter(
            "spec_decode_num_verified_rows",
            "Verified rows: the number of texts of each step, added up",
            stats.num_steps,
        )

    def _decisions(self) -> Iterator[Metric]:
        steps, asked, num_scoring = self._steps, self._steps.asked, max(self._steps.num_scoring, 1)
        yield _gauge(
            "spec_decode_gamma",
            "Mean number of draft tokens requested for a text in the last step; 0 if speculation is off",
            sum(map(sum, asked.values())) / num_scoring,
        )
        share = GaugeMetricFamily(
            "foredraft:spec_decode_drafter",
            "Share of the texts of the last step that each drafter drafted for",
            labels=["drafter"],
        )
        for name, depths in asked.items():
            share.add_metric([name], len(depths) / num_scoring)
        yield share
        yield _labelled_counter(
            "spec_decode_fallbacks",
            "Times that a drafter was switched off",
            ("drafter", "reason"),
            dict(self._llm.fallbacks),
        )
        yield from self._refits()
        by_kind = {(kind,): float(steps.num_steps[kind]) for kind in ("drafted", "plain")}
        yield _labelled_counter("engine_steps", "Engine steps, with or without drafts", ("kind",), by_kind)
        by_part = {(part,): seconds for part, seconds in steps.seconds.items()}
        yield _labelled_counter("engine_step_seconds", "Seconds of the engine's steps, by part", ("part",), by_part)

    def _refits(self) -> Iterator[Metric]:
        refits = self._llm.refits
        for name, help_text, field in (
            ("spec_decode_refits", "Times that a drafter learned from the texts (--adapt)", "num_refits"),
            ("spec_decode_refit_tokens", "Places of texts that a drafter learned from", "num_tokens"),
            ("spec_decode_refit_seconds", "Seconds that learning took", "seconds"),
        ):
            values = {(drafter,): float(getattr(counts, field)) for drafter, counts in refits.items()}
            yield _labelled_counter(name, help_text, ("drafter",), values)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"foredraft:{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"foredraft:{name}", help_text, value=value)


def _labelled_counter(name: str, help_text: str, labels: Sequence[str], values: dict[Any, float]) -> Metric:
    family = CounterMetricFamily(f"foredraft:{name}", help_text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(list(label_values), value)
    return family
