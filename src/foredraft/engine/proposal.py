"""The interface between the engine and a drafter: the requests it gets, and the proposals it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from foredraft.engine.region import Region
from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.engine.token_tree import TreeShape
from foredraft.sampling import NO_FAILURES, Failures, Pending, Sampler, TokenProbs, joined
from foredraft.utils.host_copy import HostCopy

CERTAIN = -1

Parents: TypeAlias = Sequence[Sequence[int] | None]
"""For each sequence, the parents of its draft tokens; None for a chain."""


@dataclass(slots=True)
class Features:
    """Hidden states of the target for the first len() tokens of a history: for all but the pending token, if the target has read them. Valid
    only during the call of `propose` that receives them. Read-only, and not frozen for the same reason as DraftRequest.

    rows: [T, F], of all taps that the engine keeps. columns: [D], the columns of the drafter's own taps, in their order; None: all.
    length: the number of rows that are valid, the first ones; None: all.
    """

    rows: Tensor
    columns: Tensor | None = None
    length: int | None = None

    def __len__(self) -> int:
        return self.rows.shape[0] if self.length is None else self.length

    def since(self, start: int, at_most: int | None = None) -> Tensor:
        """[T - start, D], the features of the tokens from position `start` on, at most so many, with the drafter's taps side by side."""
        num_rows = len(self) - start
        rows = self.rows.narrow(0, start, num_rows if at_most is None else min(at_most, num_rows))
        return rows if self.columns is None else rows[:, self.columns]

    def narrowed(self, wanted: Sequence[int], taps: Sequence[int]) -> Features:
        """The features of the wanted taps only, in that order. taps: all taps of these features."""
        if tuple(wanted) == tuple(taps):
            return self
        columns = torch.arange(self.rows.shape[1]) if self.columns is None else self.columns
        by_tap = columns.reshape(len(taps), len(columns) // len(taps))
        return Features(self.rows, by_tap[[taps.index(tap) for tap in wanted]].flatten(), self.length)


@dataclass(slots=True)
class DraftRequest:
    """What a drafter may know about one sequence. Read-only, although not frozen: to make a frozen one takes several times as long, for
    every sequence and step.

    tokens: the history, followed by num_forced tokens that the sampler's constraint forces (they will be accepted); read-only. The
        last one is the pending token.
    max_len: the most draft tokens to propose; may be 0.
    sampler: turns the drafter's logits into the distribution it must draw from, and draws from it.
    features: hidden states of the target, for a drafter that taps them; None for others.
    region: the target's keys and values, for a drafter with `shares_cache`; None for others. It is a view, valid only during the
        call of `propose`: what the drafter writes through it comes after the tokens that the target has read, has room for max_len
        tokens after the pending one, and is overwritten by the target.
    shape: the wanted tree, for a drafter with `grows_trees`; it may have more nodes than max_len. None: a chain.
    source: what the encoder of an encoder-decoder reads; NO_SOURCE for other targets.
    encoded: the output of the target's encoder for the source, [len(source), width], for a drafter with `reads_encoder`; None for
        others, and before the encoder has run.
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
        """The tokens of the source followed by the history, for drafters that copy."""
        return [*self.source.ids, *self.tokens] if self.source.ids else self.tokens

    @property
    def has_all_features(self) -> bool:
        """Whether the features cover the whole history but its pending token. They do whenever the scheduler asks a drafter that reads
        them, except for a history of one token."""
        return self.features is not None and self._is_read(len(self.features))

    @property
    def has_all_keys(self) -> bool:
        """The same for the target's keys and values."""
        return self.region is not None and self._is_read(len(self.region.tokens))

    def _is_read(self, num_read: int) -> bool:
        return num_read == len(self.tokens) - self.num_forced - 1 > 0


class Proposal:
    """All draft tokens of a step. Row b proposes `ids[b, :lens[b]]`; a length of zero is legal.

    ids: [B, K] int64. lens: [B] int64.
    prob_rows: [B, K] int64, the row of `probs` that each id was drawn from, or CERTAIN (-1): a point mass.
    probs: [R, V], one distribution for every id that was sampled; None if every id was certain.
    kept_ids: [R, W] int64 if the distributions keep few ids: probs is then [R, W], over these ids. None: over all ids.
    parents: None if every row is a chain; else for each row None (a chain), or for each of its ids the index of its parent: an
        earlier id of the row, or ROOT (-1) for the pending token.

    Certain and sampled ids may be mixed, also within a row; but the ids of a tree are all certain, and siblings differ. Children
    are best chosen with the request's coupled noise (Sampler.coupled_spec), which the target uses to verify a tree. If a drafter
    proposes chains too, the ids of its trees at some depth must not depend on the noise of deeper ones.

    It is made from tensors or, by `certain` and `of`, from lists, and converts to the other form on demand: most steps need only
    lists, and making a small tensor costs as much as drafting a row. So writing to tensors that were made from lists has no
    effect.

    is_certain: whether it was made from certain tokens only.

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
        certain. parents: as above. Raises TypeError for a token that is not an integer, ValueError for lists that do not fit together."""
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
        """A proposal of draft tokens that were not drawn: each is a point mass."""
        return cls.of(rows, None, None, parents)

    @property
    def given_tensors(self) -> dict[str, Tensor]:
        """ids, lens and prob_rows, if it was made from tensors."""
        return {"ids": self.ids, "lens": self.lens, "prob_rows": self.prob_rows} if self._has_tensors else {}

    def reread(self) -> Proposal:
        """The same proposal without the lists derived from its tensors, since a drafter may have written to those again."""
        return self.replaced() if self._has_tensors else self

    def replaced(self, **tensors: Any) -> Proposal:
        """A proposal with some tensors replaced. tensors: by the names of the constructor's arguments."""
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
        """The distributions that the sampled tokens were drawn from."""
        return None if self.probs is None else TokenProbs(self.probs, self.kept_ids)

    @property
    def drafted(self) -> Tensor:
        """[B, K] bool: which places hold a draft token. The others are padding."""
        return torch.arange(self.ids.shape[1])[None] < self.lens[:, None]

    @staticmethod
    def merged(parts: Sequence[tuple[Sequence[int], Proposal]], num_rows: int) -> Proposal:
        """Merge several proposals into one. parts: (its rows in the result, a proposal). Rows without a part have no draft."""
        if not parts:
            return Proposal.certain([()] * num_rows)
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
    """The same parents, or None if all rows are chains."""
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
    """An int64 tensor. For a few numbers this takes a third of the time of torch.tensor."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


class DeviceDraft(NamedTuple):
    """Draft tokens that a device is still choosing. rows: for each request its chain, as placeholders that stand for ids (see
    model/placeholders.py)."""

    ids: HostCopy
    rows: Sequence[Sequence[int]]


class PendingProposal(Pending[Proposal]):
    """A proposal that depends on a device. draft: its tokens there, if the proposal will have no others."""

    def __init__(self, finish: Callable[[], Proposal], draft: DeviceDraft | None = None) -> None:
        super().__init__([], lambda _: finish())
        self.draft = draft


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verification. Sequence b emits the draft tokens at paths[b], then next_ids[b].

    paths: for each sequence, the indices in its draft of the accepted tokens, in order; range(n) for a chain.
    next_ids: the recovered token, or the bonus token after full acceptance.
    near_ties: for each sequence, whether each token that it emits was a near tie; () where none are counted.
    failed: for each sequence, the rows without a distribution -> what went wrong there. A row is named by the number of draft
        tokens before it on the path. A failure matters only if its row is reached: rows 0 .. len(paths[b]) are.
    """

    paths: Sequence[Sequence[int]]
    next_ids: Sequence[int]
    near_ties: Sequence[Sequence[bool]]
    failed: Sequence[Failures]

    @property
    def num_accepted(self) -> list[int]:
        """The number of accepted draft tokens of each sequence."""
        return [len(path) for path in self.paths]

    @staticmethod
    def of_chains(num_accepted: Sequence[int], next_ids: Sequence[int]) -> Verdict:
        """The verdict that accepts the first num_accepted[b] draft tokens; no near ties are counted, and no row failed."""
        size = len(num_accepted)
        return Verdict([range(n) for n in num_accepted], next_ids, [()] * size, [NO_FAILURES] * size)


class Drafter(Protocol):
    """Anything that proposes draft tokens. It never sees the engine and is never trusted. Optional attributes:

    bytes_held: the cache memory it has taken from the engine's pool; when memory is short, drafters free theirs first.
    taps: a tuple of the hidden states of the target it reads (numbered as in model.Body), passed as `features` of its requests.
    shares_cache: True if it runs layers of the target over the target's own keys and values, passed as `region` of its requests.
    reads_encoder: True if it reads the output of the target's encoder, passed as `encoded` of its requests.
    grows_trees: True if it can propose trees.
    begin(requests) -> Pending[Proposal]: starts work elsewhere that `propose` would wait for (see `begin`). If it is a PendingProposal
        with a draft, the target may read that draft before the proposal is known.

    A drafter that can keep what it has read for later texts is a `RetainingDrafter` (see drafter_group.py)."""

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        """Propose draft tokens for each request: row b for requests[b]. Every id must be drawn from the row of probs that it names."""
        ...

    def forget(self, seq_ids: list[int]) -> None:
        """Free all that is held for these sequences, which finished or were aborted or preempted."""
        ...


def taps_of(drafter: Drafter) -> tuple[int, ...]:
    """The hidden states of the target that it reads; () for most."""
    return tuple(getattr(drafter, "taps", ()))


def shares_cache(drafter: Drafter) -> bool:
    """Whether it runs layers of the target over the target's own keys and values."""
    return bool(getattr(drafter, "shares_cache", False))


def reads_encoder(drafter: Drafter) -> bool:
    """Whether it reads the output of the target's encoder."""
    return bool(getattr(drafter, "reads_encoder", False))


def grows_trees(drafter: Drafter) -> bool:
    """Whether it can propose trees."""
    return bool(getattr(drafter, "grows_trees", False))


def begin(drafter: Drafter, requests: list[DraftRequest]) -> Pending[Proposal]:
    """The drafter's pending proposal. A drafter with `begin` starts now; any other proposes only when the result is resolved, so that
    those with `begin` can draft meanwhile."""
    own: Callable[[list[DraftRequest]], Pending[Proposal]] | None = getattr(drafter, "begin", None)
    return Pending([], lambda _: drafter.propose(requests)) if own is None else own(requests)


def bytes_held(drafter: Drafter) -> int:
    """The bytes of cache memory that it holds."""
    return int(getattr(drafter, "bytes_held", 0))
