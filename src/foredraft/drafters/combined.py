"""What drafters that ask other drafters have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from foredraft.engine.proposal import (
    Drafter,
    DraftRequest,
    Features,
    bytes_held,
    reads_encoder,
    shares_cache,
    taps_of,
)
from foredraft.engine.stats import PrefixStats
from foredraft.engine.token_tree import ROOT, TreeShape

_PRIOR_WEIGHT = 6.0
"""The weight of a prior, in observations."""
_MAX_COUNTED = 256
"""Counts are halved when they reach this, so that means follow the text."""


class SequenceHistory(Protocol):
    """The state of one sequence. length: of its history when it was last asked for."""

    length: int


History = TypeVar("History", bound=SequenceHistory)


class CombinedDrafter(Generic[History]):
    """Asks its parts for drafts.

    parts: drafters by name. The engine also owns them; this drafter stores nothing for them but a history of each sequence.
    """

    def __init__(self, parts: Mapping[str, Drafter]) -> None:
        self._parts = dict(parts)
        self.taps = tuple(sorted({tap for part in parts.values() for tap in taps_of(part)}))
        self.shares_cache = any(shares_cache(part) for part in parts.values())
        self.reads_encoder = any(reads_encoder(part) for part in parts.values())
        self.prefix_stats = PrefixStats()  # the parts count their own
        self._histories: dict[int, History] = {}

    def with_parts(self, change: Callable[[Drafter], Drafter]) -> Self:
        """A new drafter that combines what `change` makes of each part. It has no state yet."""
        return type(self)({name: change(part) for name, part in self._parts.items()})

    @property
    def bytes_held(self) -> int:
        """The bytes that its parts hold."""
        return sum(bytes_held(part) for part in self._parts.values())

    def forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            self._histories.pop(seq_id, None)
        for part in self._parts.values():
            part.forget(seq_ids)

    def retain(self, seq_id: int, history: Sequence[int]) -> None:
        """Forget the sequence. The engine asks each part to retain its own state."""
        self._histories.pop(seq_id, None)

    def drop_retained(self) -> None:
        """There is nothing to drop: only the parts retain."""

    def _history_of(self, request: DraftRequest, new: Callable[[], History]) -> History:
        """The sequence's history; a new one if it has none, or if its id is used for another sequence."""
        history = self._histories.get(request.seq_id)
        if history is None or len(request.tokens) < history.length:
            history = self._histories[request.seq_id] = new()
        return history

    def _request_for(
        self, part: Drafter, request: DraftRequest, max_len: int, shape: TreeShape | None = None
    ) -> DraftRequest:
        """The request for a part, with what it reads."""
        return replace(
            request,
            max_len=max_len,
            shape=shape,
            features=self._features_for(part, request.features),
            region=request.region if shares_cache(part) else None,
            encoded=request.encoded if reads_encoder(part) else None,
        )

    def _features_for(self, part: Drafter, features: Features | None) -> Features | None:
        taps = taps_of(part)
        return features.narrowed(taps, self.taps) if taps and features is not None else None


Key = TypeVar("Key")


class CountedMeans(Generic[Key]):
    """A mean for each key, which follows what was counted last. prior: the mean before anything was counted."""

    def __init__(self, prior: Callable[[Key], float]) -> None:
        self._prior = prior
        self._counts: dict[Key, tuple[float, float]] = {}

    def of(self, key: Key) -> float:
        total, number = self._counts.get(key, (0.0, 0.0))
        return (total + _PRIOR_WEIGHT * self._prior(key)) / (number + _PRIOR_WEIGHT)

    def count(self, key: Key, value: float) -> None:
        total, number = self._counts.get(key, (0.0, 0.0))
        scale = 0.5 if number + 1 >= _MAX_COUNTED else 1.0
        self._counts[key] = scale * (total + value), scale * (number + 1)


class Offer(NamedTuple):
    """What a part drafted. children: for each place in ids, the places of its children, best first; ROOT for the first tokens."""

    ids: Sequence[int]
    children: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, ids: Sequence[int], parents: Sequence[int] | None) -> Offer:
        """ids, parents: as in Proposal"""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(range(ROOT, len(ids) - 1) if parents is None else parents):
            children.setdefault(parent, []).append(node)
        return cls(ids, children)

    def walk(self, written: Iterable[int]) -> Iterator[tuple[Sequence[int], int | None]]:
        """For each token of the text, up to the first that was not offered: the places of the tokens that were, and of the right one among
        them. written: the tokens that the text has after the pending token"""
        node = ROOT
        for token in written:
            children = self.children.get(node, ())
            right = next((child for child in children if self.ids[child] == token), None)
            yield children, right
            if right is None:
                return
            node = right
