"""The inputs and outputs of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from foredraft.engine.region import Region, Regions
from foredraft.engine.token_tree import ROOT
from foredraft.kernels import CacheSpan, SourceSpan, StackBatch
from foredraft.model.rows import RowRule


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens of one sequence that follow what the cache holds of it; logits are wanted for the last num_logits.

    parents: for each token, the index of the earlier token that it follows, or ROOT if it follows what the cache holds; None: each
    follows the one before it. No two tokens with the same parent may be equal.
    """

    seq_id: int
    tokens: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None


def read_with_draft(read: Read, draft_ids: Sequence[int], parents: Sequence[int] | None) -> Read:
    """A read of a chain that ends with the pending token, and of a draft after it, with logits from the pending token on. parents: as in
    Proposal, None for a chain."""
    tokens, num_logits = [*read.tokens, *draft_ids], len(draft_ids) + 1
    if parents is None or list(parents) == list(range(ROOT, len(parents) - 1)):
        return Read(read.seq_id, tokens, num_logits)
    pending = len(read.tokens) - 1
    tree = [*range(ROOT, pending), *(pending + 1 + parent for parent in parents)]
    return Read(read.seq_id, tokens, num_logits, tree)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows first_row .. first_row + num_rows of a pass, which belong to the sequence in `region`. start: how many tokens the region holds
    already, at positions and slots 0 .. start. padding: rows after the span that belong to no sequence. paths: for each row, the slots of
    the positions from start to its own; None: the rows are a chain, each at the slot of its position."""

    region: Region
    first_row: int
    num_rows: int
    start: int
    padding: int = 0
    paths: Sequence[Sequence[int]] | None = None


class RaggedBatch(NamedTuple):
    """Rows of several sequences, flattened.

    ids: [R]. positions: [R], a row's depth in its text, which determines rotary angles and masks. slots: [R], where a row's keys and
    values are written in its region. spans: cover the rows in order. wanted: the rows whose logits are computed.

    The rows of a span are a chain, at positions and slots start, start + 1, ..; or a tree, whose rows have any slots (start <= slot <
    capacity, all different) and paths that name the slots they see. A row attends to the positions up to its own, in order of position
    whatever their slots are, so its bits do not depend on the slots: a row of a tree has the bits of that row in the chain of its path.
    The next pass expects slots 0 .. start in order again (see Region.keep_prefix_of).
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    spans: list[Span]
    wanted: list[int]

    @property
    def is_contiguous(self) -> bool:
        """Whether each row's slot is its position."""
        return self.slots is self.positions or self.slots == self.positions

    def located(self, num_layers: int, like: Tensor, features_width: int = 0) -> StackBatch:
        """The same batch with addresses instead of regions, for kernels that write to the cache themselves. like: an example of a layer's
        keys [H, *, D]. features_width: of the tapped hidden states that they write; 0: none."""
        spans = [
            CacheSpan(
                span.first_row,
                span.num_rows,
                span.start,
                span.region.capacity,
                span.region.addresses(num_layers, like),
                span.paths,
                None if (source := span.region.source) is None else SourceSpan(source.length, source.addresses()),
                span.region.features_address(features_width) if features_width else None,
            )
            for span in self.spans
        ]
        return StackBatch(self.ids, self.positions, None if self.is_contiguous else self.slots, self.wanted, spans)


class Reading(NamedTuple):
    """logits: [len(wanted), V]. hidden: [R, F], the tapped hidden states, concatenated; None without taps, or if the body has written
    them to the regions."""

    logits: Tensor
    hidden: Tensor | None = None


def flatten(reads: Sequence[Read], cache: Regions, num_generated: Sequence[int] | None = None) -> RaggedBatch:
    """One batch that continues each sequence from what the cache holds of it. num_generated: how many tokens will be generated after each
    read, which must be a chain. Raises RuntimeError if no room has been reserved, or a read wants more rows of logits than it has
    tokens."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
    wanted: list[int] = []
    for i, read in enumerate(reads):
        region = cache.region(read.seq_id)
        start, length = len(region.tokens), len(read.tokens)
        needed = length if num_generated is None else length + num_generated[i] - 1
        if start + needed > region.capacity:
            raise RuntimeError(f"sequence {read.seq_id}: no room is reserved for {needed} more tokens")
        num_logits = read.num_logits if num_generated is None else 1
        if num_logits > length:
            raise RuntimeError(
                f"sequence {read.seq_id}: {num_logits} rows of logits were requested for {length} tokens"
            )
        paths = None if read.parents is None else paths_of(read.parents, start)
        spans.append(Span(region, len(ids), length, start, paths=paths))
        ids.extend(read.tokens)
        slots.extend(range(start, start + length))
        positions.extend(slots[-length:] if paths is None else (start + len(path) - 1 for path in paths))
        wanted.extend(range(len(ids) - num_logits, len(ids)))
    return RaggedBatch(ids, positions, positions if slots == positions else slots, spans, wanted)


def paths_of(parents: Sequence[int], start: int) -> list[list[int]]:
    """For each row of a tree, the slots of the rows from the root to itself, where row i has the slot start + i. parents: as in Read.
    Raises ValueError for a parent that is not an earlier row."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        if not ROOT <= parent < row:
            raise ValueError(f"the parent of row {row} must be an earlier row, not {parent}")
        paths.append([*(() if parent == ROOT else paths[parent]), start + row])
    return paths


class Branch(NamedTuple):
    """Rows of a tree that follow each other, and the slots that the last of them sees from the tree's start on."""

    rows: list[int]
    slots: Sequence[int]


def branches_of(paths: Sequence[Sequence[int]]) -> list[Branch]:
    """The rows of a tree along its branches, each row once. paths: as in Span."""
    rows = {path[-1]: row for row, path in enumerate(paths)}
    inner = {slot for path in paths for slot in path[:-1]}
    branches: list[Branch] = []
    seen: set[int] = set()
    for path in paths:
        if path[-1] not in inner:
            branches.append(Branch([rows[slot] for slot in path if slot not in seen], path))
            seen.update(path)
    return branches


def remember(reads: Sequence[Read], batch: RaggedBatch) -> None:
    """Record the tokens that were read: a whole chain, or of a tree the chain before its first fork. The cache will keep one path of the
    rest."""
    for read, span in zip(reads, batch.spans, strict=True):
        if read.parents is None:
            span.region.tokens.extend(read.tokens)
            continue
        stem = next((i for i, parent in enumerate(read.parents) if read.parents.count(parent) > 1), len(read.parents))
        span.region.tokens.extend(read.tokens[:stem])
        span.region.branch(read.tokens[stem:], [parent - stem for parent in read.parents[stem:]])


def padded_batch(batch: RaggedBatch, rule: RowRule) -> RaggedBatch:
    """The batch with as many rows as the rule asks for. The new ones belong to no sequence."""
    ids, positions, slots, spans, wanted = batch
    missing = rule.pad(len(ids)) - len(ids)
    if missing:
        ids, positions = ids + [0] * missing, positions + positions[-1:] * missing
        slots = positions if batch.is_contiguous else slots + slots[-1:] * missing
        spans = [*spans[:-1], replace(spans[-1], padding=missing)]
    wanted = wanted + [0] * (rule.pad(len(wanted)) - len(wanted))
    return RaggedBatch(ids, positions, slots, spans, wanted)
