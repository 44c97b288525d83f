"""The joined frames of a watcher are the generated text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.server.live.broadcaster import MAX_SHOWN, Broadcaster, WatcherState
from foredraft.server.live.observer import LiveObserver

PROMPT = "def binary_search(items, target):"


class Watcher:
    """Joins frames as a page does."""

    def __init__(self, broadcaster: Broadcaster) -> None:
        self.broadcaster = broadcaster
        state = broadcaster.join()
        assert state is not None
        self.state: WatcherState = state
        self.texts: dict[int, dict[str, Any]] = {}
        self.tokens: dict[int, dict[int, tuple[int, str, int]]] = {}
        self.rounds: list[dict[str, Any]] = []
        self.samples: list[list[float]] = []
        self.about: dict[str, Any] = {}
        self.shown: list[int] = []

    def look(self) -> bool:
        frame = self.broadcaster.frame(self.state)
        if frame is None:
            return False
        frame = json.loads(json.dumps(frame))
        self.about = frame.get("about", self.about)
        self.samples += frame["samples"]
        self.rounds += frame["rounds"]
        self.shown = frame["shown"]
        for told in frame["texts"]:
            self.texts[told["id"]] = self.texts.get(told["id"], {}) | told
            places = self.tokens.setdefault(told["id"], {})
            for place, token in enumerate(told["tokens"], start=told["at"]):
                assert place not in places, "told twice"
                places[place] = tuple(token)
        return True

    def token_ids(self, number: int) -> list[int]:
        return [token for _, (token, _, _) in sorted(self.tokens[number].items())]

    def text(self, number: int) -> str:
        return "".join(text for _, (_, text, _) in sorted(self.tokens[number].items()))


def write(
    llm: LLM, watchers: list[Watcher], *params: SamplingParams, prompt: str = PROMPT, every: int = 1
) -> list[Any]:
    """Run requests while each watcher takes a frame every `every` steps. -> the outputs"""
    requests = [llm.frontend.prepare(prompt, one) for one in params]
    for request in requests:
        llm.frontend.start(request)
    steps = 0
    while not all(request.is_finished for request in requests):
        llm.engine.step()
        steps += 1
        if steps % every == 0:
            for watcher in watchers:
                watcher.look()
    for watcher in watchers:
        watcher.look()
    return [request.output() for request in requests]


@pytest.fixture
def observer(make_observer: Any, monkeypatch: pytest.MonkeyPatch) -> LiveObserver:
    monkeypatch.setattr("foredraft.server.live.observer._ROUND_SHARE", 1e9)  # every step is reported
    monkeypatch.setattr("foredraft.server.live.observer._ROUND_SECONDS", 0.0)
    made: LiveObserver = make_observer()
    return made


@pytest.mark.parametrize("every", [1, 5, 1000])
def test_frames_joined_are_the_text(llm: LLM, observer: LiveObserver, every: int) -> None:
    watchers = [Watcher(Broadcaster(observer))]
    params = [SamplingParams(max_tokens=40, temperature=t, ignore_eos=True) for t in (0.0, 0.9)]
    outputs = write(llm, watchers, *params, every=every)
    (watcher,) = watchers
    assert len(watcher.texts) == 2
    for number, output in zip(sorted(watcher.texts), outputs, strict=True):
        (text,) = output.outputs
        told = watcher.texts[number]
        assert watcher.token_ids(number) == text.token_ids
        assert [origin for _, (_, _, origin) in sorted(watcher.tokens[number].items())] == list(map(int, text.origins))
        assert watcher.text(number) == llm.tokenizer.decode(text.token_ids)  # type: ignore[union-attr]
        assert told["prompt"].endswith(PROMPT)
        assert (told["num_tokens"], told["finish_reason"], told["is_ended"]) == (40, "length", True)
        stats = output.metrics.stats
        assert told["num_accepted_tokens"] == stats.num_accepted_tokens
        assert told["num_evaluated_tokens"] == stats.num_evaluated_tokens


def test_the_latest_sample_has_the_fields_that_the_page_reads(llm: LLM, observer: LiveObserver) -> None:
    watcher = Broadcaster(observer)
    state = watcher.join()
    assert state is not None
    write(llm, [], SamplingParams(max_tokens=4))
    frame = watcher.frame(state)
    assert frame is not None
    assert {"time", "num_emitted_tokens", "cache_total", "asked", "resting", "fallbacks"} <= frame["latest"].keys()


def test_rounds_contain_drafted_and_accepted_tokens(llm: LLM, observer: LiveObserver) -> None:
    watcher = Watcher(Broadcaster(observer))
    (output,) = write(llm, [watcher], SamplingParams(max_tokens=40, temperature=0.9, ignore_eos=True))
    written = output.outputs[0].token_ids
    assert len(watcher.rounds) > 5
    for one in watcher.rounds:
        kept = [token["id"] for token in one["draft"] if token["verdict"] == "accepted"]
        kept += [one["own"]["id"]] if one["own"] else []
        assert written[one["at"] : one["at"] + len(kept)] == kept
        assert all(0 <= token["q"] <= 1 and 0 <= token["p"] <= 1 for token in one["draft"])


def test_a_late_watcher_gets_the_text_written_before(llm: LLM, observer: LiveObserver) -> None:
    broadcaster = Broadcaster(observer)
    request = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    llm.frontend.start(request)
    for _ in range(4):
        llm.engine.step()
    first = Watcher(broadcaster)
    first.look()
    llm.engine.step()
    second = Watcher(broadcaster)
    while not request.is_finished:
        llm.engine.step()
    for watcher in (first, second):
        watcher.look()
        (number,) = watcher.texts
        assert watcher.token_ids(number) == request.output().outputs[0].token_ids


def test_samples_at_rest_are_the_engines_counts(
    llm: LLM, observer: LiveObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.server.live.broadcaster.SAMPLE_SECONDS", 0.0)
    watcher = Watcher(Broadcaster(observer))
    write(llm, [watcher], SamplingParams(max_tokens=20))
    while watcher.look():
        pass
    shown = dict(zip(watcher.about["columns"], watcher.samples[-1], strict=True))
    stats = llm.engine.stats
    assert shown["num_emitted_tokens"] == stats.num_emitted_tokens
    assert shown["num_accepted_tokens"] == stats.num_accepted_tokens
    assert shown["num_running"] == 0
    times = [sample[watcher.about["columns"].index("time")] for sample in watcher.samples]
    assert times == sorted(times)


def test_a_slow_watcher_loses_the_beginning_of_a_text(
    llm: LLM, observer: LiveObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.server.live.live_text._MAX_TOKENS_PER_READ", 10)
    watcher = Watcher(Broadcaster(observer))
    (output,) = write(llm, [watcher], SamplingParams(max_tokens=50, ignore_eos=True), every=1000)
    (number,) = watcher.texts
    assert watcher.token_ids(number) == output.outputs[0].token_ids[-10:]
    assert min(watcher.tokens[number]) == 40
    assert watcher.texts[number]["num_tokens"] == 50


def test_without_show_text_only_origins_are_sent(llm: LLM, make_observer: Any) -> None:
    observer = make_observer(show_text=False)
    broadcaster = Broadcaster(observer)
    state = broadcaster.join()
    assert state is not None
    request = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=30, temperature=0.9, ignore_eos=True))
    llm.frontend.start(request)
    frames = [broadcaster.frame(state)]
    while not request.is_finished:
        llm.engine.step()
        frames.append(broadcaster.frame(state))
    assert not any(frame and frame["rounds"] for frame in frames)
    texts = [text for frame in frames if frame for text in frame["texts"]]
    assert all(text.get("prompt") is None for text in texts)
    tokens = [token for text in texts for token in text["tokens"]]
    assert {(token, text) for token, text, _ in tokens} == {(0, "")}
    assert [origin for _, _, origin in tokens] == list(map(int, request.output().outputs[0].origins))


def test_the_number_of_shown_texts_is_limited_and_others_follow(llm: LLM, observer: LiveObserver) -> None:
    broadcaster = Broadcaster(observer)
    watcher = Watcher(broadcaster)
    short, long = SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True)
    write(llm, [watcher], *[short] * MAX_SHOWN, *[long] * 4)
    assert len(watcher.shown) == 4
    assert len(watcher.texts) == MAX_SHOWN + 4


def test_an_aborted_text_is_reported_as_ended(llm: LLM, observer: LiveObserver) -> None:
    watcher = Watcher(Broadcaster(observer))
    request = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
    llm.frontend.start(request)
    llm.engine.step()
    watcher.look()
    llm.frontend.abort(request)
    watcher.look()
    (told,) = watcher.texts.values()
    assert (told["is_ended"], told["finish_reason"]) == (True, "abort")


def test_the_number_of_watchers_is_limited(make_observer: Any) -> None:
    observer = make_observer(max_watchers=2)
    broadcaster = Broadcaster(observer)
    assert broadcaster.join()
    assert broadcaster.join()
    assert broadcaster.join() is None
    broadcaster.leave()
    assert broadcaster.join()
    observer.close()
    broadcaster.leave()
    assert broadcaster.join() is None


def test_without_an_engine_nobody_can_watch() -> None:
    assert Broadcaster(LiveObserver()).join() is None


def test_observing_stops_when_the_last_watcher_leaves(llm: LLM, observer: LiveObserver) -> None:
    broadcaster = Broadcaster(observer)
    watcher = Watcher(broadcaster)
    write(llm, [watcher], SamplingParams(max_tokens=4))
    broadcaster.leave()
    llm.generate(PROMPT, SamplingParams(max_tokens=4))
    assert not observer.new_texts
    assert not broadcaster._texts


def test_without_news_no_frame_is_sent(llm: LLM, observer: LiveObserver) -> None:
    watcher = Watcher(Broadcaster(observer))
    assert watcher.look()
    assert not watcher.look()
