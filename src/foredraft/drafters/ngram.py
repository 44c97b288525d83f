"""Prompt lookup: what followed the last few tokens when the history last had them.

After "prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding), with a table instead of a scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from foredraft.drafters._lookups import look_up_tree, token_at
from foredraft.engine.proposal import DraftRequest, Proposal, trees_of
from foredraft.errors import ForedraftError


class NgramDrafter:
    """Proposes the tokens after the latest earlier occurrence of the history's last n tokens, the largest n first. Where a tree is
    wanted, siblings are the tokens after occurrences of fewer tokens.

    max_ngram, min_ngram: the largest and the smallest n to look for. Single tokens (n = 1) repeat everywhere and say
        little: they pay where a row to verify costs 5 % of a pass or less, and lose where it costs 10 %.
    Time: max_ngram table writes per history token, once; a look-up is at most max_ngram reads, whatever the history.
    Memory: at most max_ngram table entries per history token, until `forget`.
    """

    grows_trees = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ForedraftError(f"1 <= min_ngram <= max_ngram must hold, not {min_ngram} and {max_ngram}")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tables: dict[int, _Table] = {}

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> one certain row per request"""
        rows = [self._row(request) for request in requests]
        return Proposal.certain([ids for ids, _ in rows], trees_of([parents for _, parents in rows]))

    def forget(self, seq_ids: list[int]) -> None:
        """Drops the tables of these sequences."""
        for seq_id in seq_ids:
            self._tables.pop(seq_id, None)

    def _row(self, request: DraftRequest) -> tuple[list[int], list[int] | None]:
        """-> tokens and parents, as in Proposal"""
        if not request.max_len:
            return [], None
        tokens = request.context
        table = self._tables.get(request.seq_id)
        if table is None or len(tokens) < table.num_read:  # new, or another history under the same id
            table = self._tables[request.seq_id] = _Table(self._sizes)
        table.catch_up(tokens)
        if request.shape is not None:
            root = _Node((), None)
            ids, parents, _ = look_up_tree(
                request.shape.cut(request.max_len), root, lambda node: _children(table, tokens, node)
            )
            return ids, parents
        start = next(table.find(tokens), None)
        return ([] if start is None else _copy(tokens, start, request.max_len)), None


class _Table:
    """Where each n-gram of one history was last followed by something.

    Example, n = 2, history a b c a b: (a, b) -> 2, (b, c) -> 3, (c, a) -> 4; the last (a, b) has no follower yet, so a
    look-up of it finds 2, and the draft starts with history[2] = c.
    """

    __slots__ = ("_sizes", "_starts", "num_read")

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._starts: dict[tuple[int, ...], int] = {}
        self.num_read = 1  # followers read so far; history[0] follows nothing

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams before each follower that was not there the last time."""
        starts, longest = self._starts, self._sizes[0]
        for follower in range(self.num_read, len(tokens)):
            before = tuple(tokens[max(0, follower - longest) : follower])
            for size in self._sizes:
                if size <= follower:
                    starts[before[-size:]] = follower
        self.num_read = len(tokens)

    def find(self, tokens: Sequence[int], path: Sequence[int] = ()) -> Iterator[int]:
        """Where to copy from: the positions after the latest earlier occurrences of the last n-grams, the longest known one first.
        path: tokens behind the history."""
        longest = self._sizes[0]
        last = (*tokens[-longest:], *path)[-longest:]
        for size in self._sizes:
            if size <= len(last):
                start = self._starts.get(last[-size:])
                if start is not None:
                    yield start


class _Node(NamedTuple):
    """A draft token of a tree. path: to it. source: where the copy that it belongs to goes on."""

    path: tuple[int, ...]
    source: int | None


def _children(table: _Table, tokens: Sequence[int], node: _Node) -> Iterator[tuple[int, _Node]]:
    """The tokens that may follow a node, each once: the copy's next one first, then those that followed its last n-grams."""
    seen = set[int]()
    for source in chain([] if node.source is None else [node.source], table.find(tokens, node.path)):
        token = token_at(tokens, node.path, source)
        if token is not None and token not in seen:
            seen.add(token)
            yield token, _Node((*node.path, token), source + 1)


def _copy(tokens: Sequence[int], start: int, max_len: int) -> list[int]:
    """max_len tokens from `start` on; at the end of the history the copy goes on reading itself (a b | a b a b ...)."""
    draft = list(tokens[start : start + max_len])
    while len(draft) < max_len:
        draft += draft[: max_len - len(draft)]
    return draft
