"""The observer's counts equal the engine's, and observing changes nothing."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.engine.step import Step
from foredraft.server.live.observer import NUM_SAMPLES, LiveObserver

PROMPTS = ["def area(radius):", "Once upon a time", "import os"]


class Tally:
    """Counts independently what an observer counts."""

    def __init__(self) -> None:
        self.num_passes = self.num_asked_steps = self.num_asked_tokens = 0

    def observe(self, step: Step) -> None:
        self.num_passes += 1
        self.num_asked_steps += sum(item.max_draft > 0 for item in step.scoring)
        self.num_asked_tokens += sum(item.max_draft for item in step.scoring)


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_an_observers_counts_are_the_engines(llm: LLM, make_observer: Any, draft_tokens: int) -> None:
    observer, tally = make_observer(), Tally()
    llm.engine.observers.append(tally)
    params = SamplingParams(max_tokens=24, temperature=0.8, speculative_tokens=draft_tokens)
    llm.generate(PROMPTS, params)
    llm.engine.observers.remove(tally)
    sample = observer.sample()
    stats = asdict(llm.engine.stats)
    for name, value in sample.counts._asdict().items():
        assert value == (stats[name] if name in stats else getattr(tally, name)), name
    assert sum(sample.asked.values()) == sample.counts.num_asked_steps
    assert (sample.counts.num_asked_steps > 0) == (draft_tokens > 0)
    assert (sample.num_running, sample.num_waiting) == (0, 0)
    assert (sample.cache_used, sample.cache_total) == (llm.engine.pool.used, llm.engine.pool.total)


def test_nothing_is_kept_while_nobody_watches(llm: LLM, make_observer: Any) -> None:
    observer = make_observer()
    llm.generate(PROMPTS, SamplingParams(max_tokens=40))
    assert observer.samples
    assert not observer.new_texts
    assert not observer.rounds


@pytest.mark.slow
def test_what_an_observer_keeps_is_bounded(llm: LLM, make_observer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.server.live.observer.SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr("foredraft.server.live.observer._ROUND_SHARE", 1e9)
    monkeypatch.setattr("foredraft.server.live.observer._ROUND_SECONDS", 0.0)
    observer = make_observer()
    observer.set_watched(True)
    observer.shown = range(1 << 40)  # all texts
    for _ in range(4):
        llm.generate(PROMPTS * 7, SamplingParams(max_tokens=100, speculative_tokens=0))
    for queue in (observer.samples, observer.new_texts, observer.rounds):
        assert len(queue) == queue.maxlen
    assert observer.samples.maxlen == NUM_SAMPLES
    assert not observer._known


def test_observing_changes_no_text(llm: LLM, make_observer: Any) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5)
    alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
    observer = make_observer()
    observer.set_watched(True)
    observer.shown = range(1 << 40)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == alone
    assert observer.rounds


def test_an_error_in_the_observer_ends_no_request(
    llm: LLM, make_observer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: LiveObserver, *_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LiveObserver, "_collect_texts", fail)
    observer = make_observer()
    observer.set_watched(True)
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8
    assert observer.is_closed
    assert caplog.text.count("the live page failed") == 1


def test_an_idle_time_is_separated_from_the_text_before_and_after(
    llm: LLM, make_observer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two samples around an idle time no count grows, however long it was."""
    monkeypatch.setattr("foredraft.server.live.observer.SAMPLE_SECONDS", 0.2)
    observer = make_observer()
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    before = llm.engine.stats.num_emitted_tokens
    llm.generate(PROMPTS[0], params)
    time.sleep(0.5)
    llm.generate(PROMPTS[0], params)
    samples = [*observer.samples, observer.sample()]
    rests = [(a, b) for a, b in pairwise(samples) if b.time - a.time >= 0.4]
    ((begin, end),) = rests[-1:]
    assert begin.counts.num_emitted_tokens == end.counts.num_emitted_tokens == before + 10
    assert samples[-1].counts.num_emitted_tokens == before + 20
