"""What a step reads and minimises, where several temperatures are to be served: they take turns, and each reads what the
target wrote at it. At temperature 0 a target writes other texts than at 1, and a draft of few layers cannot be at its best
everywhere under both laws; nor need it be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.train.blocks import Blocks, batch_places, joined, packed
from foredraft.train.objectives import Objective


@dataclass(frozen=True, slots=True)
class Turn:
    """blocks: what it reads. objective: what it minimises there."""

    blocks: Blocks
    objective: Objective


@dataclass(frozen=True, slots=True)
class Turns:
    """Step n is turn n modulo their number."""

    turns: tuple[Turn, ...]

    @property
    def num_blocks(self) -> int:
        return sum(len(turn.blocks) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(turn.blocks.num_tokens for turn in self.turns)

    def at(self, seed: int, step: int, batch_size: int) -> Turn:
        """The blocks that this step reads, and its objective: a pure function, so that a run goes on from any step."""
        turn = self.turns[step % len(self.turns)]
        places = batch_places(seed, step // len(self.turns), batch_size, len(turn.blocks))
        return Turn(turn.blocks.at(places), turn.objective)


def dealt(
    documents: Sequence[Sequence[int]],
    generated: Sequence[Sequence[int]],
    objectives: Sequence[Objective],
    length: int,
    end_id: int | None,
) -> Turns:
    """A turn for each objective. documents: their blocks are dealt out to the turns. generated: text n was written for
    objective n modulo their number, and is read in its turn. length: tokens of a block. end_id: see packed.

    Raises ForedraftError where there is nothing to predict.
    """
    number = len(objectives)
    files = packed(documents, length, end_id) if documents or not generated else None
    turns = []
    for place, objective in enumerate(objectives):
        parts = [] if files is None else [files.at(range(place % len(files), len(files), number))]
        if own := generated[place::number]:
            parts.append(packed(own, length, end_id))
        turns.append(Turn(joined(parts), objective))
    return Turns(tuple(turns))
