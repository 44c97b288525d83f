"""What a step reads and minimises if several temperatures are to be served. Their tasks take turns, and each reads what the
target wrote at its temperature. At temperature 0 a target writes other texts than at 1, and a draft of few layers cannot fit both
distributions well on all texts; nor does it need to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.train.blocks import Blocks, CountGiven, batch_indices, concatenate, nothing_given, pack
from foredraft.train.objectives import Objective


@dataclass(frozen=True, slots=True)
class Task:
    """blocks: what to read. objective: what to minimise on them."""

    blocks: Blocks
    objective: Objective


@dataclass(frozen=True, slots=True)
class TaskRotation:
    """Step n belongs to task n modulo their number."""

    tasks: tuple[Task, ...]

    @property
    def num_blocks(self) -> int:
        return sum(len(task.blocks) for task in self.tasks)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are predicted."""
        return sum(task.blocks.num_tokens for task in self.tasks)

    def batch(self, seed: int, step: int, batch_size: int) -> Task:
        """The blocks that this step reads, and its objective: a pure function, so that a run can resume at any step."""
        task = self.tasks[step % len(self.tasks)]
        indices = batch_indices(seed, step // len(self.tasks), batch_size, len(task.blocks))
        return Task(task.blocks.select(indices), task.objective)


def make_tasks(
    documents: Sequence[Sequence[int]],
    written: Sequence[Sequence[Sequence[int]]],
    objectives: Sequence[Objective],
    length: int,
    end_id: int | None,
    count_given: CountGiven = nothing_given,
) -> TaskRotation:
    """One task for each objective. documents: their blocks are split between the tasks. written: for each objective the texts
    that the target wrote for it. length: tokens of a block. end_id: see pack. count_given: for the texts in `written`.

    Raises ForedraftError if there is nothing to predict.
    """
    num_tasks = len(objectives)
    document_blocks = pack(documents, length, end_id) if documents or not any(written) else None
    tasks = []
    for index, (objective, texts) in enumerate(zip(objectives, written, strict=True)):
        parts = []
        if document_blocks is not None:
            first = index % len(document_blocks)
            parts.append(document_blocks.select(range(first, len(document_blocks), num_tasks)))
        if texts:
            parts.append(pack(texts, length, end_id, count_given))
        tasks.append(Task(concatenate(parts), objective))
    return TaskRotation(tuple(tasks))
