"""Prompt lookup: draft the tokens that followed the previous occurrence of the history's last few tokens.

Based on "prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding), with a table instead of a scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from foredraft.drafters._lookups import look_up_tree, token_at
from foredraft.engine.proposal import DraftRequest, Proposal, trees_of
from foredraft.errors import ForedraftError


class NgramDrafter:
    """Proposes the tokens after the latest earlier occurrence of the history's last n tokens, trying the largest n first. If a tree
    is requested, siblings are the tokens after occurrences of shorter n-grams.

    max_ngram, min_ngram: the largest and the smallest n to look for. Single tokens (n = 1) repeat everywhere and predict
        little: they pay off if verifying a row costs 5 % of a pass or less, and lose time if it costs 10 %.
    Time: max_ngram table writes per history token, once; a look-up is at most max_ngram reads, for any history length.
    Memory: at most max_ngram table entries per history token, until `forget`.
    """

    grows_trees = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ForedraftError(
                f"min_ngram and max_ngram must satisfy 1 <= min_ngram <= max_ngram, but are {min_ngram} and {max_ngram}"
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tables: dict[int, _Table] = {}

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """-> one row of certain tokens per request"""
        rows = [self._row(request) for request in requests]
        return Proposal.certain([ids for ids, _ in rows], trees_of([parents for _, parents in rows]))

    def forget(self, seq_ids: list[int]) -> None:
        """Drop the tables of these sequences."""
        for seq_id in seq_ids:
            self._tables.pop(seq_id, None)

    def _row(self, request: DraftRequest) -> tuple[list[int], list[int] | None]:
        """-> tokens and parents, as in Proposal"""
        if not request.max_len:
            return [], None
        tokens = request.context
        table = self._tables.get(request.seq_id)
        if table is None or len(tokens) < table.num_read:  # new, or the id is used for another history
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
    """For each n-gram of one history, the position of the token that followed its last occurrence.

    Example, n = 2, history a b c a b: (a, b) -> 2, (b, c) -> 3, (c, a) -> 4. The last (a, b) has no follower yet, so
    looking it up finds 2, and the draft starts with history[2] = c.
    """

    __slots__ = ("_sizes", "_starts", "num_read")

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._starts: dict[tuple[int, ...], int] = {}
        self.num_read = 1  # followers read so far; history[0] follows nothing

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Enter the n-grams that end before each token added since the last call."""
        starts, longest = self._starts, self._sizes[0]
        for follower in range(self.num_read, len(tokens)):
            before = tuple(tokens[max(0, follower - longest) : follower])
            for size in self._sizes:
                if size <= follower:
                    starts[before[-size:]] = follower
        self.num_read = len(tokens)

    def find(self, tokens: Sequence[int], path: Sequence[int] = ()) -> Iterator[int]:
        """The positions to copy from: those after the latest earlier occurrences of the final n-grams, longest known n-gram first.
        path: draft tokens after the history."""
        longest = self._sizes[0]
        last = (*tokens[-longest:], *path)[-longest:]
        for size in self._sizes:
            if size <= len(last):
                start = self._starts.get(last[-size:])
                if start is not None:
                    yield start


class _Node(NamedTuple):
    """A draft token of a tree. path: the tokens that lead to it, its own included. source: where its copy continues."""

    path: tuple[int, ...]
    source: int | None


def _children(table: _Table, tokens: Sequence[int], node: _Node) -> Iterator[tuple[int, _Node]]:
    """The candidate children of a node, each token once: the copy's next token, then those that followed its final n-grams."""
    seen = set[int]()
    for source in chain([] if node.source is None else [node.source], table.find(tokens, node.path)):
        token = token_at(tokens, node.path, source)
        if token is not None and token not in seen:
            seen.add(token)
            yield token, _Node((*node.path, token), source + 1)


def _copy(tokens: Sequence[int], start: int, max_len: int) -> list[int]:
    """max_len tokens from `start` on. At the end of the history the copy continues with its own tokens (a b | a b a b ...)."""
    draft = list(tokens[start : start + max_len])
    while len(draft) < max_len:
        draft += draft[: max_len - len(draft)]
    return draft
