"""The seam between the engine and a drafter: what a drafter may know, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from foredraft.engine.region import Region
from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.engine.token_tree import TreeShape
from foredraft.sampling import NO_FAILURES, Failures, Pending, Sampler, TokenProbs, joined

CERTAIN = -1

Parents: TypeAlias = Sequence[Sequence[int] | None]
"""Of the draft tokens of each sequence; None for a chain."""


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of the target for the first tokens of a history: of all but the pending token once it was verified, of fewer
    before. len() says of how many. Valid during the call of `propose` that they are given to.

    rows: [T, F], of all taps that the engine keeps. columns: [D], those of the drafter's own taps, in their order; None: all.
    """

    rows: Tensor
    columns: Tensor | None = None

    def __len__(self) -> int:
        return self.rows.shape[0]

    def since(self, start: int) -> Tensor:
        """[T - start, D], of the tokens from position `start` on, the drafter's taps side by side."""
        rows = self.rows[start:]
        return rows if self.columns is None else rows[:, self.columns]

    def narrowed(self, wanted: Sequence[int], taps: Sequence[int]) -> Features:
        """Those of the taps that are wanted, in their order. taps: of these features."""
        if tuple(wanted) == tuple(taps):
            return self
        columns = torch.arange(self.rows.shape[1]) if self.columns is None else self.columns
        by_tap = columns.reshape(len(taps), len(columns) // len(taps))
        return Features(self.rows, by_tap[[taps.index(tap) for tap in wanted]].flatten())


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter may know of one sequence.

    tokens: the history, and behind it num_forced tokens that the sampler's constraint leaves no choice about (they will
        stand); read-only. The last one is the pending token.
    max_len: never propose more draft tokens than this; may be 0.
    sampler: turns the drafter's logits into the distribution it must draw from, and draws from it.
    features: hidden states of the target, for a drafter that taps them; None for others.
    region: the target's keys and values, for a drafter with `shares_cache`; None for others. It is a view, valid during the
        call of `propose`: what is read through it lies behind the tokens that the target has read, with room for max_len
        tokens behind the pending one, and the target overwrites it.
    shape: of the tree that is wanted, for a drafter with `grows_trees`; it may have more nodes than max_len. None: a chain.
    source: what an encoder-decoder's text answers; NO_SOURCE for other targets.
    encoded: what the target's encoder gave of the source, [len(source), width], for a drafter with `reads_encoder`; None for others,
        and before the target has read it.
    """

    seq_id: int
    tokens: Sequence[int]
    max_len: int
    sampler: Sampler
    features: Features | None = None
    num_forced: int = 0
    region: Region | None = None
    shape: TreeShape | None = None
    source: Source = NO_SOURCE
    encoded: Tensor | None = None

    @property
    def context(self) -> Sequence[int]:
        """All tokens that were known before and since: the source's and the history behind them. For drafters that copy."""
        return [*self.source.ids, *self.tokens] if self.source.ids else self.tokens

    @property
    def has_all_features(self) -> bool:
        """Whether the target has read the whole history but its pending token, and its features are there. Not so before the
        first verification, and for a history of one token there is nothing to read."""
        return self.features is not None and self._is_read(len(self.features))

    @property
    def has_all_keys(self) -> bool:
        """The same of its keys and values."""
        return self.region is not None and self._is_read(len(self.region.tokens))

    def _is_read(self, num_read: int) -> bool:
        return num_read == len(self.tokens) - self.num_forced - 1 > 0


class Proposal:
    """All draft tokens of a step. Row b proposes `ids[b, :lens[b]]`; zero is legal.

    ids: [B, K] int64. lens: [B] int64.
    prob_rows: [B, K] int64, the row of `probs` each id was drawn from, or CERTAIN (-1): a point mass.
    probs: [R, V], one distribution for every id that was sampled; None where every id was certain.
    kept_ids: [R, W] int64 where the distributions keep few ids: probs is [R, W] then, of these ids. None: of every id.
    parents: where some row is a tree: for each row the place of the id before each of its ids, an earlier one, or ROOT (-1): behind
        the pending token; None for a chain, in which each id follows the one before it. None: every row is a chain.

    Certain and sampled ids may be mixed, also within a row; but the ids of a tree are all certain, and siblings differ. Children
    are best taken with the request's coupled noise (Sampler.coupled_spec): the target draws with it behind a tree. Which ids a
    tree has at some depth must not depend on the noise of deeper ones, where a drafter gives chains too.

    It is made of tensors or, by `certain` and `of`, of lists. Each form is made from the other where it is asked for: most steps
    need lists only, and a small tensor costs as much as drafting a row. So what is written to tensors that were made from lists
    changes nothing.

    is_certain: whether it was made of certain tokens alone.

    Raises ValueError for tensors that do not fit together.
    """

    is_certain: bool
    probs: Tensor | None
    kept_ids: Tensor | None
    parents: Parents | None
    _has_tensors: bool

    def __init__(
        self,
        ids: Tensor,
        lens: Tensor,
        prob_rows: Tensor,
        probs: Tensor | None = None,
        kept_ids: Tensor | None = None,
        parents: Parents | None = None,
    ) -> None:
        numbers = _check_lens(ids, lens, prob_rows)
        if parents is not None:
            _check_parents(parents, numbers)
        self.ids, self.lens, self.prob_rows = ids, lens, prob_rows
        self.probs, self.kept_ids, self.parents = probs, kept_ids, parents
        self.is_certain, self._has_tensors = False, True

    @classmethod
    def of(
        cls,
        rows: Sequence[Sequence[int]],
        prob_rows: Sequence[Sequence[int]] | None,
        token_probs: TokenProbs | None = None,
        parents: Parents | None = None,
    ) -> Proposal:
        """rows: the draft tokens of each sequence. prob_rows: which row of token_probs each was drawn from, or CERTAIN; None: all are
        certain. parents: as above. Raises TypeError for a token that is no integer, and ValueError for lists that do not fit together."""
        made = cls.__new__(cls)
        made.draft_ids = [list(map(index, row)) for row in rows]
        if prob_rows is not None:
            made.draft_prob_rows = [list(map(index, row)) for row in prob_rows]
            if list(map(len, made.draft_prob_rows)) != list(map(len, made.draft_ids)):
                raise ValueError("prob_rows must name a row for each id")
        made.probs, made.kept_ids = (None, None) if token_probs is None else (token_probs.probs, token_probs.ids)
        made.parents, made.is_certain, made._has_tensors = parents, prob_rows is None, False
        if parents is not None:
            _check_parents(parents, list(map(len, made.draft_ids)))
        return made

    @classmethod
    def certain(cls, rows: Sequence[Sequence[int]], parents: Parents | None = None) -> Proposal:
        """Draft tokens that were not drawn: each is a point mass."""
        return cls.of(rows, None, None, parents)

    @property
    def given_tensors(self) -> dict[str, Tensor]:
        """ids, lens and prob_rows, where it was made of them."""
        return {"ids": self.ids, "lens": self.lens, "prob_rows": self.prob_rows} if self._has_tensors else {}

    def reread(self) -> Proposal:
        """The same, without what was derived from its tensors: a drafter may have filled them anew."""
        return self.replaced() if self._has_tensors else self

    def replaced(self, **tensors: Any) -> Proposal:
        """Made of its tensors, but for those that are given by the names of the constructor's arguments."""
        names = ("ids", "lens", "prob_rows", "probs", "kept_ids", "parents")
        return Proposal(**{name: getattr(self, name) for name in names} | tensors)

    @property
    def num_rows(self) -> int:
        """B"""
        return len(self.lens) if self._has_tensors else len(self.draft_ids)

    @cached_property
    def ids(self) -> Tensor:
        return _table(self.draft_ids, 0)

    @cached_property
    def lens(self) -> Tensor:
        return tensor_of([len(row) for row in self.draft_ids])

    @cached_property
    def prob_rows(self) -> Tensor:
        return _table(self.draft_prob_rows, CERTAIN)

    @cached_property
    def draft_ids(self) -> list[list[int]]:
        """The draft tokens of each row, without the padding."""
        return _cut(self.ids, self.lens)

    @cached_property
    def draft_prob_rows(self) -> list[list[int]]:
        """prob_rows of each row, without the padding."""
        return (
            _cut(self.prob_rows, self.lens) if self._has_tensors else [[CERTAIN] * len(row) for row in self.draft_ids]
        )

    @property
    def draft_parents(self) -> Parents:
        """parents of each row; None where the row is a chain."""
        return [None] * self.num_rows if self.parents is None else self.parents

    @property
    def token_probs(self) -> TokenProbs | None:
        """What was sampled was drawn from these."""
        return None if self.probs is None else TokenProbs(self.probs, self.kept_ids)

    @property
    def drafted(self) -> Tensor:
        """[B, K] bool: which places hold a draft token. The others are padding."""
        return torch.arange(self.ids.shape[1])[None] < self.lens[:, None]

    @staticmethod
    def merged(parts: Sequence[tuple[Sequence[int], Proposal]], num_rows: int) -> Proposal:
        """One proposal of several: each part with the rows it is for. Rows without a part have no draft."""
        if len(parts) == 1 and len(parts[0][0]) == num_rows:
            return parts[0][1]
        ids: list[list[int]] = [[] for _ in range(num_rows)]
        drawn_from: list[list[int]] = [[] for _ in range(num_rows)]
        parents: list[Sequence[int] | None] = [None] * num_rows
        token_probs: list[TokenProbs] = []
        for rows, part in parts:
            first = sum(probs.probs.shape[0] for probs in token_probs)
            columns = (part.draft_ids, part.draft_prob_rows, part.draft_parents)
            for row, part_ids, part_prob_rows, part_parents in zip(rows, *columns, strict=True):
                ids[row], parents[row] = part_ids, part_parents
                drawn_from[row] = [i if i == CERTAIN else first + i for i in part_prob_rows]
            token_probs += [] if part.token_probs is None else [part.token_probs]
        prob_rows = None if all(part.is_certain for _, part in parts) else drawn_from
        return Proposal.of(ids, prob_rows, joined(token_probs) if token_probs else None, trees_of(parents))


def trees_of(parents: Parents) -> Parents | None:
    """None where all are chains."""
    return None if all(row is None for row in parents) else parents


def _check_lens(ids: Tensor, lens: Tensor, prob_rows: Tensor) -> list[int]:
    """-> lens"""
    if ids.ndim != 2 or ids.shape != prob_rows.shape:
        raise ValueError(f"ids {tuple(ids.shape)} and prob_rows {tuple(prob_rows.shape)} must both be [B, K]")
    if lens.shape != ids.shape[:1]:
        raise ValueError(f"lens {tuple(lens.shape)} must be [B] for ids {tuple(ids.shape)}")
    numbers: list[int] = lens.tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) <= ids.shape[1]:
        raise ValueError(f"lens must lie between 0 and K = {ids.shape[1]}")
    return numbers


def _check_parents(parents: Parents, lens: Sequence[int]) -> None:
    if len(parents) != len(lens) or any(p is not None and len(p) != n for p, n in zip(parents, lens, strict=True)):
        raise ValueError("a tree needs a parent for each of its ids")


def _table(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """[len(rows), length of the longest] int64"""
    width = max(map(len, rows), default=0)
    return tensor_of([[*row, *[filler] * (width - len(row))] for row in rows]).view(len(rows), width)


def _cut(table: Tensor, lens: Tensor) -> list[list[int]]:
    """table: [B, K], lens: [B] -> B lists of the first lens[b] numbers"""
    return [row[:length] for row, length in zip(table.tolist(), lens.tolist(), strict=True)]


def tensor_of(numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """int64. For a few numbers this costs a third of torch.tensor."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verification. Sequence b emits the draft tokens at paths[b], then next_ids[b].

    paths: for each sequence, the places in its draft of the tokens that stand, in order; range(n) for a chain.
    next_ids: the recovered token, or the bonus token after full acceptance.
    near_ties: for each sequence, whether each token that it emits was a near tie; () where none are counted.
    failed: for each sequence, the rows that have no distribution -> what went wrong there. A row is named by the number of
        draft tokens before it on the path. It matters only if the row is reached: rows 0 .. len(paths[b]) are.
    """

    paths: Sequence[Sequence[int]]
    next_ids: Sequence[int]
    near_ties: Sequence[Sequence[bool]]
    failed: Sequence[Failures]

    @property
    def num_accepted(self) -> list[int]:
        """How many draft tokens of each sequence stand."""
        return [len(path) for path in self.paths]

    @staticmethod
    def of_chains(num_accepted: Sequence[int], next_ids: Sequence[int]) -> Verdict:
        """The first num_accepted[b] draft tokens stand; no near ties are counted, and no row failed."""
        size = len(num_accepted)
        return Verdict([range(n) for n in num_accepted], next_ids, [()] * size, [NO_FAILURES] * size)


class Drafter(Protocol):
    """Anything that proposes. Never sees the engine, and is never trusted. One that takes cache memory from the engine's
    pool says how much it has as `bytes_held`: where memory is short, it is the first to give it up. One that can keep
    what it read for later texts is a `RetainingDrafter` (see drafter_group.py). One that reads hidden states of the target
    names them in `taps`, a tuple (see model.Body for the numbers), and gets them as the `features` of its requests. One that
    runs layers of the target over the target's own keys and values has `shares_cache`, a true attribute, and gets those as the
    `region` of its requests. One that goes on from what the target's encoder gave has `reads_encoder`, a true attribute, and gets
    that as the `encoded` of its requests. One that can answer with trees has `grows_trees`, a true attribute. One that others
    work for, who may begin before it waits for them, has `begin(requests) -> Pending[Proposal]` too (see `begin`)."""

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """Draft tokens for each request, row b for requests[b]. Every id must be drawn from the row of probs that it names."""
        ...

    def forget(self, seq_ids: list[int]) -> None:
        """These sequences finished, were aborted or preempted: give back all that is held for them."""
        ...


def taps_of(drafter: Drafter) -> tuple[int, ...]:
    """The hidden states of the target that it reads; () for most."""
    return tuple(getattr(drafter, "taps", ()))


def shares_cache(drafter: Drafter) -> bool:
    """Whether it runs layers of the target over the target's own keys and values."""
    return bool(getattr(drafter, "shares_cache", False))


def reads_encoder(drafter: Drafter) -> bool:
    """Whether it goes on from what the target's encoder gave of a source."""
    return bool(getattr(drafter, "reads_encoder", False))


def grows_trees(drafter: Drafter) -> bool:
    """Whether it can answer with trees."""
    return bool(getattr(drafter, "grows_trees", False))


def begin(drafter: Drafter, requests: list[DraftRequest]) -> Pending[Proposal]:
    """Its answer to the requests. A drafter elsewhere is asked now and waited for when the result is resolved; every other one proposes
    then, so that all that are elsewhere draft meanwhile."""
    own: Callable[[list[DraftRequest]], Pending[Proposal]] | None = getattr(drafter, "begin", None)
    return Pending([], lambda _: drafter.propose(requests)) if own is None else own(requests)


def bytes_held(drafter: Drafter) -> int:
    """Of the cache memory."""
    return int(getattr(drafter, "bytes_held", 0))
