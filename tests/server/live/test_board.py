"""What watchers are told, frame by frame, is what was written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import LLM, SamplingParams
from foredraft.server.live.board import MOST_SHOWN, Board, Seen, _Tail
from foredraft.server.live.feed import LiveFeed

PROMPT = "def binary_search(items, target):"


class Watcher:
    """Puts frames together as a page does."""

    def __init__(self, board: Board) -> None:
        self.board = board
        seen = board.join()
        assert seen is not None
        self.seen: Seen = seen
        self.texts: dict[int, dict[str, Any]] = {}
        self.tokens: dict[int, dict[int, tuple[int, str, int]]] = {}
        self.rounds: list[dict[str, Any]] = []
        self.samples: list[list[float]] = []
        self.about: dict[str, Any] = {}
        self.shown: list[int] = []

    def look(self) -> bool:
        frame = self.board.frame(self.seen)
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
    """Run requests, with a look of each watcher every so many steps -> the outputs."""
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
def feed(make_feed: Any, monkeypatch: pytest.MonkeyPatch) -> LiveFeed:
    monkeypatch.setattr("foredraft.server.live.feed._ROUND_SHARE", 1e9)  # every round is told
    monkeypatch.setattr("foredraft.server.live.feed._ROUND_SECONDS", 0.0)
    made: LiveFeed = make_feed()
    return made


@pytest.mark.parametrize("every", [1, 5, 1000])
def test_frames_joined_are_the_text(llm: LLM, feed: LiveFeed, every: int) -> None:
    watchers = [Watcher(Board(feed))]
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


def test_rounds_are_what_was_drafted_and_kept(llm: LLM, feed: LiveFeed) -> None:
    watcher = Watcher(Board(feed))
    (output,) = write(llm, [watcher], SamplingParams(max_tokens=40, temperature=0.9, ignore_eos=True))
    written = output.outputs[0].token_ids
    assert len(watcher.rounds) > 5
    for one in watcher.rounds:
        kept = [token["id"] for token in one["draft"] if token["verdict"] == "accepted"]
        kept += [one["own"]["id"]] if one["own"] else []
        assert written[one["at"] : one["at"] + len(kept)] == kept
        assert all(0 <= token["q"] <= 1 and 0 <= token["p"] <= 1 for token in one["draft"])


def test_who_comes_late_sees_what_was_written_before(llm: LLM, feed: LiveFeed) -> None:
    board = Board(feed)
    request = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    llm.frontend.start(request)
    for _ in range(4):
        llm.engine.step()
    first = Watcher(board)
    first.look()
    llm.engine.step()
    second = Watcher(board)
    while not request.is_finished:
        llm.engine.step()
    for watcher in (first, second):
        watcher.look()
        (number,) = watcher.texts
        assert watcher.token_ids(number) == request.output().outputs[0].token_ids


def test_samples_at_rest_are_the_engines_counts(llm: LLM, feed: LiveFeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.server.live.board.SAMPLE_SECONDS", 0.0)
    watcher = Watcher(Board(feed))
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


def test_a_text_that_outruns_its_watcher_loses_its_beginning(
    llm: LLM, feed: LiveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.server.live.board._MOST_AT_ONCE", 10)
    watcher = Watcher(Board(feed))
    (output,) = write(llm, [watcher], SamplingParams(max_tokens=50, ignore_eos=True), every=1000)
    (number,) = watcher.texts
    assert watcher.token_ids(number) == output.outputs[0].token_ids[-10:]
    assert min(watcher.tokens[number]) == 40
    assert watcher.texts[number]["num_tokens"] == 50


def test_without_text_only_origins_are_told(llm: LLM, make_feed: Any) -> None:
    feed = make_feed(show_text=False)
    board = Board(feed)
    seen = board.join()
    assert seen is not None
    request = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=30, temperature=0.9, ignore_eos=True))
    llm.frontend.start(request)
    frames = [board.frame(seen)]
    while not request.is_finished:
        llm.engine.step()
        frames.append(board.frame(seen))
    assert not any(frame and frame["rounds"] for frame in frames)
    texts = [text for frame in frames if frame for text in frame["texts"]]
    assert all(text.get("prompt") is None for text in texts)
    tokens = [token for text in texts for token in text["tokens"]]
    assert {(token, text) for token, text, _ in tokens} == {(0, "")}
    assert [origin for _, _, origin in tokens] == list(map(int, request.output().outputs[0].origins))


def test_only_so_many_texts_are_shown_and_others_follow(llm: LLM, feed: LiveFeed) -> None:
    board = Board(feed)
    watcher = Watcher(board)
    short, long = SamplingParams(max_tokens=4, ignore_eos=True), SamplingParams(max_tokens=40, ignore_eos=True)
    write(llm, [watcher], *[short] * MOST_SHOWN, *[long] * 4)
    assert len(watcher.shown) == 4
    assert len(watcher.texts) == MOST_SHOWN + 4


def test_a_text_that_is_given_up_makes_room(llm: LLM, feed: LiveFeed) -> None:
    watcher = Watcher(Board(feed))
    request = llm.frontend.prepare(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
    llm.frontend.start(request)
    llm.engine.step()
    watcher.look()
    llm.frontend.abort(request)
    watcher.look()
    (told,) = watcher.texts.values()
    assert (told["is_ended"], told["finish_reason"]) == (True, "abort")


def test_only_so_many_may_watch(make_feed: Any) -> None:
    feed = make_feed(max_watchers=2)
    board = Board(feed)
    assert board.join()
    assert board.join()
    assert board.join() is None
    board.leave()
    assert board.join()
    feed.close()
    board.leave()
    assert board.join() is None


def test_nobody_watches_before_there_is_an_engine() -> None:
    assert Board(LiveFeed()).join() is None


def test_the_last_who_leaves_takes_the_light(llm: LLM, feed: LiveFeed) -> None:
    board = Board(feed)
    watcher = Watcher(board)
    write(llm, [watcher], SamplingParams(max_tokens=4))
    board.leave()
    llm.generate(PROMPT, SamplingParams(max_tokens=4))
    assert not feed.met
    assert not board._texts


def test_nothing_new_is_nothing_told(llm: LLM, feed: LiveFeed) -> None:
    watcher = Watcher(Board(feed))
    assert watcher.look()
    assert not watcher.look()


@given(st.integers(1, 5), st.lists(st.integers(0, 3)), st.integers(0, 12))
def test_a_tail_is_the_end_of_a_list(most: int, items: list[int], place: int) -> None:
    tail: _Tail[int] = _Tail(most)
    for item in items:
        tail.append(item)
    place = min(place, len(items))
    assert tail.num_all == len(items)
    assert tail.since(place) == items[max(place, len(items) - most) :]
