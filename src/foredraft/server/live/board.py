"""What watchers are shown: texts with where each token came from, rounds, samples. Lives on the server's thread.

There is one board, and each watcher has a place on it: what it was told so far. A frame is all that is new since then, so
a watcher who reads slowly gets fewer and larger ones, and misses what has left the board meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from foredraft.engine.sequence import TokenSequence
from foredraft.server.live.feed import NUM_SAMPLES, SAMPLE_SECONDS, Counts, LiveFeed, Sample, Told, described
from foredraft.trace.rounds import Characters

T = TypeVar("T")

MOST_SHOWN = 8
"""Texts that are shown at a time while they are written; how many others run is told."""
_MOST_ENDED = 4
_MOST_WAITING = 64
_MOST_TOKENS = 2000
"""Tokens of a text that are kept: its last ones."""
_MOST_AT_ONCE = 1024
"""Tokens of a text that are decoded for one frame, a seventh of a second of a fast pair's; where there are more, the older ones are
passed over."""
_PROMPT_TAIL = 200
_ROUNDS_KEPT = 64
_TAIL = 64


@dataclass(slots=True)
class Seen:
    """A watcher's place: how many samples and rounds it was told, and of each text how many tokens and whether it ended."""

    has_begun: bool = False
    num_samples: int = 0
    num_rounds: int = 0
    texts: dict[int, tuple[int, bool]] = field(default_factory=dict)


class Board:
    """Everything that the feed's watchers are shown. Not thread-safe."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._samples: _Tail[Sample] = _Tail(NUM_SAMPLES)
        self._rounds: _Tail[Told] = _Tail(_ROUNDS_KEPT)
        self._waiting: deque[TokenSequence] = deque(maxlen=_MOST_WAITING)
        self._texts: dict[int, _Text] = {}
        self._num_watchers = 0

    def join(self) -> Seen | None:
        """A place for a watcher; None: there are as many as there may be."""
        if self._num_watchers >= self._feed.max_watchers or not self._feed.is_open:
            return None
        self._num_watchers += 1
        if self._num_watchers == 1:
            self._texts.clear()
            self._waiting.clear()
            self._feed.watch(True)
        return Seen()

    def leave(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers:
            self._feed.watch(False)
            self._texts.clear()
            self._waiting.clear()

    def frame(self, seen: Seen) -> dict[str, Any] | None:
        """What is new for the watcher, as JSON's types; None: nothing is. seen is brought up to date."""
        self._refresh()
        samples = self._samples.since(seen.num_samples)
        texts = [told for text in self._texts.values() if (told := text.told(seen)) is not None]
        rounds = self._rounds.since(seen.num_rounds) if seen.has_begun else []
        is_gone = seen.texts.keys() != self._texts.keys()
        if seen.has_begun and not (samples or texts or rounds or is_gone):
            return None
        seen.texts = {number: (text.num_read, text.is_ended) for number, text in self._texts.items()}
        found: dict[str, Any] = {
            "time": self._feed.now(),
            "samples": [[flat[name] for name in COLUMNS] for flat in map(Sample.flat, samples)],
            "texts": texts,
            "shown": list(self._texts),
            "rounds": [told.round.model_dump(exclude={"type"}) for told in rounds],
            "steps": {told.step.step: told.step.model_dump(exclude={"type"}) for told in rounds},
        }
        if samples:
            found["latest"] = samples[-1].flat()
        if not seen.has_begun:
            found["about"] = self._about()
        seen.has_begun = True
        seen.num_samples, seen.num_rounds = self._samples.num_all, self._rounds.num_all
        return found

    def _about(self) -> dict[str, Any]:
        return described(self._feed.llm) | {
            "show_text": self._feed.show_text,
            "columns": COLUMNS,
            "seconds": NUM_SAMPLES * SAMPLE_SECONDS,
        }

    def _refresh(self) -> None:
        feed = self._feed
        for sample in _drained(feed.samples):
            self._samples.append(sample)
        self._samples.append_if(self._at_rest())
        known = self._texts.keys() | {sequence.seq_id for sequence in self._waiting}
        self._waiting.extendleft(s for s in _drained(feed.met) if s.seq_id not in known)
        self._place()
        for text in self._texts.values():
            text.read()
        for told in _drained(feed.rounds):
            self._rounds.append(told)

    def _at_rest(self) -> Sample | None:
        """What the engine's own samples lack once it stands still: the end of the last text."""
        last = self._samples.last
        if last is not None and self._feed.now() - last.time < SAMPLE_SECONDS:
            return None
        now = self._feed.sample()
        if last is None:
            return now
        if now._replace(time=last.time) == last:
            return None
        return now if now.time > last.time else now._replace(time=self._feed.now())

    def _place(self) -> None:
        """Who came last is shown first. The last ones that ended stay to be read, those that nobody saw running included."""
        num_open = sum(not text.sequence.is_finished for text in self._texts.values())
        chosen, left, num_ended = [], [], 0
        for sequence in self._waiting:
            if sequence.is_finished:
                num_ended += 1
                if num_ended <= _MOST_ENDED:
                    chosen.append(sequence)
            elif num_open < MOST_SHOWN:
                num_open += 1
                chosen.append(sequence)
            else:
                left.append(sequence)
        self._waiting = deque(left, maxlen=_MOST_WAITING)
        for sequence in reversed(chosen):
            self._texts[sequence.seq_id] = _Text(sequence, self._feed)
        ended = [number for number, text in self._texts.items() if text.sequence.is_finished]
        for number in ended[: max(0, len(ended) - _MOST_ENDED)]:
            del self._texts[number]
        self._feed.shown = frozenset(self._texts)


COLUMNS = ("time", *Counts._fields, "num_running", "num_waiting", "cache_used", "cache_retained")
"""Of a sample, what is told of each; all of it is told of the last."""


class _Text:
    """A text as it is written: its last tokens with their characters and origins."""

    def __init__(self, sequence: TokenSequence, feed: LiveFeed) -> None:
        self.sequence = sequence
        self.num_read = 0
        self.is_ended = False
        self._shows = feed.show_text
        self._tokenizer: PreTrainedTokenizerBase | None = feed.llm.tokenizer if feed.show_text else None
        self._tokens: _Tail[tuple[int, str, int]] = _Tail(_MOST_TOKENS)
        self._characters = self._characters_at(sequence.prompt_len)
        self._prompt = self._decoded_prompt()

    def read(self) -> None:
        """Take up the tokens that came since the last call."""
        sequence = self.sequence
        is_ended = sequence.is_finished
        num_output = sequence.num_output
        begin = sequence.prompt_len + self.num_read
        end = sequence.prompt_len + num_output
        if end - begin > _MOST_AT_ONCE:
            begin = end - _MOST_AT_ONCE
            self._characters = self._characters_at(begin)
            self._tokens.skip(begin - sequence.prompt_len)
        ids = sequence.tokens[begin:end]
        origins = sequence.origins[begin - sequence.prompt_len : num_output]
        for token, characters, origin in zip(ids, self._characters.push(ids), origins, strict=True):
            self._tokens.append((token if self._shows else 0, characters, int(origin)))
        self.num_read = num_output
        self.is_ended = is_ended

    def told(self, seen: Seen) -> dict[str, Any] | None:
        """What a watcher does not know of it yet; None: it knows all."""
        known = seen.texts.get(self.sequence.seq_id)
        if known == (self.num_read, self.is_ended):
            return None
        sequence, stats = self.sequence, self.sequence.stats
        tokens = self._tokens.since(known[0] if known else 0)
        until = sequence.last_token_at or sequence.arrived_at
        found: dict[str, Any] = {
            "id": sequence.seq_id,
            "at": self.num_read - len(tokens),
            "tokens": tokens,
            "num_tokens": self.num_read,
            "seconds": round(until - sequence.arrived_at, 4),
            "num_spec_steps": stats.num_spec_steps,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_evaluated_tokens": stats.num_evaluated_tokens,
            "finish_reason": sequence.finish_reason if self.is_ended else None,
            "is_ended": self.is_ended,
        }
        if known is None:
            found["prompt"] = self._prompt
            found["num_prompt_tokens"] = sequence.prompt_len
        return found

    def _characters_at(self, place: int) -> Characters:
        """From this token on, in the light of those before it."""
        return Characters(self._tokenizer, self.sequence.tokens[max(0, place - _TAIL) : place])

    def _decoded_prompt(self) -> str | None:
        """The end of it."""
        if self._tokenizer is None:
            return None
        length = self.sequence.prompt_len
        text = str(self._tokenizer.decode(self.sequence.tokens[max(0, length - _PROMPT_TAIL) : length]))
        return f"…{text}" if length > _PROMPT_TAIL else text


class _Tail(Generic[T]):
    """The last so many of a row, whose places count from the first of all."""

    def __init__(self, most: int) -> None:
        self._items: deque[T] = deque(maxlen=most)
        self.num_all = 0

    @property
    def last(self) -> T | None:
        return self._items[-1] if self._items else None

    def append(self, item: T) -> None:
        self._items.append(item)
        self.num_all += 1

    def append_if(self, item: T | None) -> None:
        if item is not None:
            self.append(item)

    def skip(self, num_all: int) -> None:
        """As if so many had been there in all, of which none is left."""
        self._items.clear()
        self.num_all = num_all

    def since(self, place: int) -> list[T]:
        """Those from this place on that are still there."""
        return list(islice(self._items, max(0, len(self._items) - (self.num_all - place)), None))


def _drained(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()
