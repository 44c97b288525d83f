"""The metrics for Prometheus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foredraft import LLM, SamplingParams
from foredraft.server.metrics import Metrics
from tests.server.conftest import SETTINGS, Running, running, wait_for

CODE = "def read_lines(path):"


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[f"foredraft:{name}", frozenset(labels.items())]


def shown(server: Running) -> dict[Any, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


def test_counts_are_those_of_the_engine(llm: LLM) -> None:
    before = llm.engine.stats
    num_drafts, num_accepted = before.num_spec_steps, before.num_accepted_tokens
    with running(llm) as server:
        body = {"prompt": CODE, "max_tokens": 40, "temperature": 0, "speculative_tokens": 3, "metrics": True}
        answer = server.post("/v1/completions", body).json()
        list(server.post("/v1/completions", {**body, "stream": True}).iter_lines())
        # a request is counted after its answer was sent, so its client may read the metrics before
        counted = {"name": "http_requests_total", "route": "/v1/completions", "status": "200"}
        wait_for(lambda: value(shown(server), **counted) == 2)
        found = shown(server)
        stats = answer["metrics"]["stats"]
        assert value(found, "spec_decode_num_drafts_total") == num_drafts + 2 * stats["num_spec_steps"]
        assert value(found, "spec_decode_num_accepted_tokens_total") == num_accepted + 2 * stats["num_accepted_tokens"]
        by_place = [v for (name, _), v in found.items() if name.endswith("_per_pos_total")]
        assert sum(by_place) == value(found, "spec_decode_num_accepted_tokens_total")
        assert value(found, "generation_tokens_total") == 80
        assert value(found, "prompt_tokens_total") == 2 * answer["usage"]["prompt_tokens"]
        assert value(found, "request_success_total", finished_reason="length") == 2
        assert value(found, "time_to_first_token_seconds_count") == 2
        assert value(found, "e2e_request_latency_seconds_count") == 2
        assert value(found, "request_queue_time_seconds_count") == 2
        num_deliveries = value(found, "inter_token_latency_seconds_count")
        assert 0 < num_deliveries <= 2 * (stats["num_steps"] - 1)
        assert value(found, "num_requests_running") == value(found, "num_requests_waiting") == 0
        assert value(found, "kv_cache_usage_perc") == 0
        assert value(found, "engine_steps_total", kind="drafted") >= 2 * stats["num_spec_steps"]
        assert found["process_resident_memory_bytes", frozenset()] > 1e6


def test_prefix_cache_hits_are_counted_and_reported(llm: LLM) -> None:
    long = CODE + " " + " ".join(f"word{i}" for i in range(60))
    body = {"prompt": long, "max_tokens": 4, "temperature": 0}
    with running(llm) as server:
        llm.engine.drop_retained()
        before = shown(server)
        usages = [
            server.post("/v1/completions", {**body, **more}).json()["usage"]
            for more in ({}, {}, {"prefix_caching": False})
        ]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, usages[0]["prompt_tokens"] - 1, 0]
        after = shown(server)
        found = {
            name: value(after, f"prefix_cache_{name}_total") - value(before, f"prefix_cache_{name}_total")
            for name in ("queries", "hits")
        }
        assert found == {"queries": 2 * (usages[0]["prompt_tokens"] - 1), "hits": cached[1]}


def test_the_current_drafter_and_number_of_draft_tokens_are_shown(llm: LLM) -> None:
    with running(llm) as server:
        for gamma in (0, 3):
            server.post(
                "/v1/completions", {"prompt": CODE, "max_tokens": 30, "temperature": 0, "speculative_tokens": gamma}
            )
            asked = server.service.metrics
            found = samples(asked.text().decode())
            assert value(found, "spec_decode_gamma") <= gamma
            assert value(found, "spec_decode_drafter", drafter="draft_model") <= (gamma > 0)


def test_fallbacks_are_counted_by_reason() -> None:
    """A drafter that crossed a threshold is not used, and the metrics say why."""
    llm = LLM(method="ngram", speculative_tokens=4, min_acceptance_rate=1.0, num_threads=1)
    with running(llm) as server:
        body = {"prompt": CODE, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
        server.post("/v1/completions", body)
        assert value(shown(server), "spec_decode_fallbacks_total", drafter="ngram", reason="min_acceptance_rate") >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_without_tokens_has_no_time_to_its_first(llm: LLM, stream: bool) -> None:
    with running(llm) as server:
        body = {"prompt": CODE, "max_tokens": 0, "echo": True, "stream": stream}
        assert server.post("/v1/completions", body).status_code == 200
        wait_for(lambda: value(shown(server), "e2e_request_latency_seconds_count") == 1)
        assert value(shown(server), "time_to_first_token_seconds_count") == 0


def test_preemptions_of_unfinished_and_aborted_texts_are_counted(llm: LLM) -> None:
    metrics, engine = Metrics(), llm.engine

    def num_preemptions() -> float:
        return value(samples(metrics.text().decode()), "num_preemptions_total")

    with metrics.observing(llm):
        before = num_preemptions()
        sequence = engine.add([0, 1, 2], SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        engine.preempt(sequence)
        assert num_preemptions() == before + 1
        engine.abort(sequence)
        assert num_preemptions() == before + 1


def test_metrics_have_separate_registries() -> None:
    first, second = Metrics(), Metrics()
    first.success.labels("stop").inc()
    assert b'request_success_total{finished_reason="stop"}' not in second.text()


def test_observers_are_removed_with_the_server(llm: LLM) -> None:
    before = list(llm.engine.observers)
    with running(llm, replace(SETTINGS)):
        assert len(llm.engine.observers) > len(before)
    assert llm.engine.observers == before


def test_unknown_paths_add_no_series(llm: LLM) -> None:
    with running(llm) as server:
        for i in range(5):
            server.get(f"/nothing/{i}")
        routes = {labels for name, labels in shown(server) if name == "foredraft:http_requests_total"}
        assert len(routes) == 1


@pytest.mark.parametrize("drafts", [0, 4])
def test_queue_times_are_measured(llm: LLM, drafts: int) -> None:
    output = llm.generate(CODE, SamplingParams(max_tokens=4, speculative_tokens=drafts))[0]
    assert output.metrics.time_in_queue is not None
    assert output.metrics.time_to_first_token is not None
    assert 0 <= output.metrics.time_in_queue <= output.metrics.time_to_first_token
