"""Translate a target's history to a draft model's ids, and draft text to the target's ids, by their bytes and incrementally."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from foredraft.utils.prefix import common_prefix
from foredraft.vocabulary.borders import last_border
from foredraft.vocabulary.byte_vocabulary import num_pending
from foredraft.vocabulary.pair import VocabularyPair

_PRIOR_IDS = 32
"""The weight, in ids, of the measured length ratio at the beginning of a text, which has too few ids of its own to estimate it from."""


class TranslatedHistory:
    """The translated history of one sequence.

    ids: the draft model's ids for the whole history except `pending`. A list that was handed out does not change, although the ids at its
    end may be replaced when the text goes on. pending: the bytes at the end that are not a whole character yet.
    """

    def __init__(self, pair: VocabularyPair) -> None:
        self.pair = pair
        self._reset()

    def _reset(self) -> None:
        self.ids: list[int] = list(self.pair.draft.prefix_ids)
        self.pending = b""
        self._ends = [0] * len(self.ids)
        self._text = bytearray()
        self._floor = 0
        self._seen: list[int] = []
        self._seen_ends: list[int] = []
        self._source: Sequence[int] | None = None

    @property
    def draft_ids_per_token(self) -> float:
        """How many draft ids one target token of this text takes: a running mean."""
        prior = self.pair.overlap.length_ratio * _PRIOR_IDS
        return (prior + len(self.ids)) / (_PRIOR_IDS + len(self._seen))

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Take in the new part of a history -> ids. Costs O(new tokens), unless it is a different history."""
        known = len(self._seen) if tokens is self._source else 0
        if common_prefix(self._seen, tokens, start=known) < len(self._seen):
            self._reset()
        self._source = tokens
        if not self._seen:
            self._begin(tokens)
        for token in tokens[len(self._seen) :]:
            self._take(token)
        self._spell(num_pending(bytes(self._text[max(self._floor, len(self._text) - 4) :])))
        return self.ids

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        """Translate what the draft model wrote after `ids` to the target's ids: the text up to a special token, and the counterpart of
        that token. Their bytes are those of the draft, or a prefix of them."""
        draft = self.pair.draft
        end = next(
            (i for i, index in enumerate(drafted) if index in draft.special or index >= len(draft)), len(drafted)
        )
        new = draft.joined(drafted[:end])
        if not new.startswith(self.pending):
            return []
        new = new[len(self.pending) :]
        ids = self._behind_tail(new)
        closing = self.pair.special_to_target.get(drafted[end]) if end < len(drafted) else None
        if closing is not None and len(self.pair.target.joined(ids)) == len(new):
            ids.append(closing)
        return ids

    def _begin(self, tokens: Sequence[int]) -> None:
        """Skip the target's prefix ids, because the draft's are already in their place. Likewise use the draft's space before a text."""
        target, prefix = self.pair.target, self.pair.target.prefix_ids
        num_prefix = len(prefix) if tuple(tokens[: len(prefix)]) == prefix else 0
        first = self._bytes_of(tokens[num_prefix]) if num_prefix < len(tokens) else None
        self._text += self.pair.draft.prefix_space if first else b""
        self._seen += tokens[:num_prefix]
        self._seen_ends += [len(self._text)] * num_prefix
        if first:
            self._append(tokens[num_prefix], first.removeprefix(target.prefix_space))

    def _take(self, token: int) -> None:
        part = self._bytes_of(token)
        if part is None:
            self._close(token)
        self._append(token, part or b"")

    def _append(self, token: int, part: bytes) -> None:
        self._text += part
        self._seen.append(token)
        self._seen_ends.append(len(self._text))

    def _bytes_of(self, token: int) -> bytes | None:
        """None for a special token, and for an id past the vocabulary: logits may be wider."""
        return self.pair.target.bytes_of[token] if token < len(self.pair.target) else None

    def _close(self, token: int) -> None:
        """Take a special token: the text before it is encoded separately from the text after it."""
        self._spell(0)
        counterpart = self.pair.special_to_draft.get(token)
        if counterpart is not None:
            self.ids = [*self.ids, counterpart]
            self._ends.append(len(self._text))
        self._floor = len(self._text)

    def _spell(self, num_left: int) -> None:
        """Encode the text but the last num_left bytes, starting at the last border in the part that is already encoded."""
        written = max(self._floor, self._ends[-1] if self._ends else 0)
        end = len(self._text) - num_left
        self.pending = bytes(self._text[end:])
        if end <= written:
            return
        border = last_border(self._text, self._floor, written)
        kept = bisect_right(self._ends, border)
        start = max(self._floor, self._ends[kept - 1] if kept else 0)
        ids, ends = self.pair.draft.spell(bytes(self._text[start:end]))
        self.ids = [*self.ids[:kept], *ids]
        self._ends[kept:] = [start + each for each in ends]

    def _behind_tail(self, new: bytes) -> list[int]:
        """The target's ids for `new`. They may depend on the text before it, so the target's last ids are encoded with it; if those come
        out different, `new` is encoded by itself."""
        tail, data = self._tail()
        ids = self.pair.target.write(data + new)
        return ids[len(tail) :] if ids[: len(tail)] == tail else self.pair.target.write(new)

    def _tail(self) -> tuple[list[int], bytes]:
        """The target's last ids, from a border on, and their bytes."""
        border = last_border(self._text, self._floor, len(self._text))
        first = bisect_right(self._seen_ends, border)
        if not first or self._seen_ends[first - 1] < border:
            first = bisect_left(self._seen_ends, border) + 1
        return self._seen[first:], bytes(self._text[self._seen_ends[first - 1] :]) if first <= len(self._seen) else b""
