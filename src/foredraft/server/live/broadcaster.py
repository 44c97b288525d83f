"""Makes what watchers of the live page are sent: texts with the origin of each token, rounds and samples. Runs on the server's
thread.

All watchers share one broadcaster, and each has a state: what it has been sent so far. A frame is everything new since then. So
a watcher that reads slowly gets fewer and larger frames, and misses what was dropped meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from foredraft.engine.sequence import TokenSequence
from foredraft.llm import LLM
from foredraft.server.live.live_text import LiveText
from foredraft.server.live.observer import NUM_SAMPLES, SAMPLE_SECONDS, LiveObserver, RecordedRound
from foredraft.server.live.ring_buffer import RingBuffer
from foredraft.server.live.samples import Counts, Sample
from foredraft.trace.recorder import header_of

T = TypeVar("T")

MAX_SHOWN = 8
"""Unfinished texts that are shown at a time."""
_MAX_ENDED = 4
"""Finished texts that stay on the page."""
_MAX_WAITING = 64
_MAX_ROUNDS = 64

COLUMNS = ("time", *Counts._fields, "num_running", "num_waiting", "cache_used", "cache_retained")
"""The fields of every sample that are sent; the latest sample is sent whole."""


@dataclass(slots=True)
class WatcherState:
    """What a watcher was sent: the number of samples and rounds, and for each text the number of tokens and whether it ended."""

    has_begun: bool = False
    num_samples: int = 0
    num_rounds: int = 0
    texts: dict[int, tuple[int, bool]] = field(default_factory=dict)


class Broadcaster:
    """Makes the frames of all watchers of an observer. Not thread-safe."""

    def __init__(self, observer: LiveObserver) -> None:
        self._observer = observer
        self._samples: RingBuffer[Sample] = RingBuffer(NUM_SAMPLES)
        self._rounds: RingBuffer[RecordedRound] = RingBuffer(_MAX_ROUNDS)
        self._waiting: deque[TokenSequence] = deque(maxlen=_MAX_WAITING)
        self._texts: dict[int, LiveText] = {}
        self._num_watchers = 0

    def join(self) -> WatcherState | None:
        """Add a watcher. None if there are max_watchers already, or nothing to watch."""
        if self._num_watchers >= self._observer.max_watchers or not self._observer.is_open:
            return None
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._texts.clear()
            self._waiting.clear()
            self._observer.set_watched(True)
        return WatcherState()

    def leave(self) -> None:
        """Remove a watcher."""
        self._num_watchers -= 1
        if not self._num_watchers:
            self._observer.set_watched(False)
            self._texts.clear()
            self._waiting.clear()

    def frame(self, state: WatcherState) -> dict[str, Any] | None:
        """What is new for a watcher, as JSON; None if nothing is. Updates the state."""
        self._refresh()
        samples = self._samples.since(state.num_samples)
        updates = (text.update(state.texts.get(seq_id)) for seq_id, text in self._texts.items())
        texts = [update for update in updates if update is not None]
        rounds = self._rounds.since(state.num_rounds) if state.has_begun else []
        has_other_texts = state.texts.keys() != self._texts.keys()
        if state.has_begun and not (samples or texts or rounds or has_other_texts):
            return None
        frame = self._as_frame(samples, texts, rounds)
        if not state.has_begun:
            frame["about"] = self._about()
        state.has_begun = True
        state.texts = {seq_id: (text.num_read, text.is_ended) for seq_id, text in self._texts.items()}
        state.num_samples, state.num_rounds = self._samples.num_all, self._rounds.num_all
        return frame

    def _as_frame(
        self, samples: list[Sample], texts: list[dict[str, Any]], rounds: list[RecordedRound]
    ) -> dict[str, Any]:
        frame: dict[str, Any] = {
            "time": self._observer.now(),
            "samples": [[flat[name] for name in COLUMNS] for flat in map(Sample.flat, samples)],
            "texts": texts,
            "shown": list(self._texts),
            "rounds": [recorded.round.model_dump(exclude={"type"}) for recorded in rounds],
            "steps": {recorded.step.step: recorded.step.model_dump(exclude={"type"}) for recorded in rounds},
        }
        if samples:
            frame["latest"] = samples[-1].flat()
        return frame

    def _about(self) -> dict[str, Any]:
        return describe(self._observer.llm) | {
            "show_text": self._observer.show_text,
            "columns": COLUMNS,
            "seconds": NUM_SAMPLES * SAMPLE_SECONDS,
        }

    def _refresh(self) -> None:
        """Take over what the observer has collected."""
        observer = self._observer
        for sample in _drain(observer.samples):
            self._samples.append(sample)
        final = self._idle_sample()
        if final is not None:
            self._samples.append(final)
        known = self._texts.keys() | {sequence.seq_id for sequence in self._waiting}
        self._waiting.extendleft(s for s in _drain(observer.new_texts) if s.seq_id not in known)
        self._choose_texts()
        for text in self._texts.values():
            text.read()
        for recorded in _drain(observer.rounds):
            self._rounds.append(recorded)

    def _idle_sample(self) -> Sample | None:
        """The state after the last step, which the observer does not sample if the engine is idle; None if it was sampled."""
        last = self._samples.last
        if last is not None and self._observer.now() - last.time < SAMPLE_SECONDS:
            return None
        sample = self._observer.sample()
        if last is None:
            return sample
        if sample._replace(time=last.time) == last:
            return None
        return sample if sample.time > last.time else sample._replace(time=self._observer.now())

    def _choose_texts(self) -> None:
        """Show waiting texts while there is room, the newest first, and drop the oldest of those that ended. Texts that ended
        before they could be shown are shown too."""
        num_open = sum(not text.sequence.is_finished for text in self._texts.values())
        chosen, left, num_ended = [], [], 0
        for sequence in self._waiting:
            if sequence.is_finished:
                num_ended += 1
                if num_ended <= _MAX_ENDED:
                    chosen.append(sequence)
            elif num_open < MAX_SHOWN:
                num_open += 1
                chosen.append(sequence)
            else:
                left.append(sequence)
        self._waiting = deque(left, maxlen=_MAX_WAITING)
        for sequence in reversed(chosen):
            self._texts[sequence.seq_id] = self._live_text(sequence)
        ended = [seq_id for seq_id, text in self._texts.items() if text.sequence.is_finished]
        for seq_id in ended[: max(0, len(ended) - _MAX_ENDED)]:
            del self._texts[seq_id]
        self._observer.shown = frozenset(self._texts)

    def _live_text(self, sequence: TokenSequence) -> LiveText:
        return LiveText(sequence, show_text=self._observer.show_text, tokenizer=self._observer.llm.tokenizer)


def describe(llm: LLM) -> dict[str, Any]:
    """The model's properties that do not change while the server runs."""
    header = header_of(llm).model_dump(include={"foredraft", "method", "device", "target", "draft"})
    return header | {"drafters": list(llm.drafters), "speculative_tokens": llm.speculative_tokens}


def _drain(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()
