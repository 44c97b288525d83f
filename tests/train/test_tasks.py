"""The steps of each temperature read the texts written at it and their share of the files; together they read everything once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.train.blocks import IGNORED, Blocks
from foredraft.train.losses import LossSums
from foredraft.train.tasks import make_tasks

LENGTH, END = 4, 0
OF_FILES = 100
"""Tokens of files have ids from here on; texts written for objective n consist of n + 1."""


class Unused:
    """An objective that is never called."""

    def __call__(self, student: PreTrainedModel, ids: Tensor, next_ids: Tensor, progress: float) -> LossSums:
        raise AssertionError("nothing is trained here")


def read_by(blocks: Blocks) -> list[int]:
    return [token for token in blocks.next_ids.flatten().tolist() if token not in (IGNORED, END)]


@given(
    st.lists(st.integers(1, 30), max_size=6),
    st.lists(st.integers(1, 30), min_size=3, max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_a_task_reads_its_own_texts(
    files: list[int], written: list[int], number: int, seed: int, batch_size: int
) -> None:
    """For all lengths of files and of the target's own texts, each task reads its share, and together they read everything."""
    objectives = [Unused() for _ in range(number)]
    documents = [[END, *range(OF_FILES, OF_FILES + size)] for size in files]
    texts = [[END, *[n % number + 1] * size] for n, size in enumerate(written)]
    rotation = make_tasks(documents, [texts[n::number] for n in range(number)], objectives, LENGTH, END)
    batches: list[Tensor] = []
    for index, task in enumerate(rotation.tasks):
        own = [token for token in read_by(task.blocks) if token < OF_FILES]
        assert own == [index + 1] * sum(written[index::number])
        for step in range(index, number * len(task.blocks), number):  # as many epochs of it as a batch has blocks
            some = rotation.batch(seed, step, batch_size)
            assert some.objective is objectives[index]
            assert len(some.blocks) == batch_size
            batches.append(some.blocks.ids)
    assert sum(len(ids) for ids in batches) == rotation.num_blocks * batch_size
    whole = torch.cat([task.blocks.ids for task in rotation.tasks]).repeat(batch_size, 1)
    assert sorted(torch.cat(batches).tolist()) == sorted(whole.tolist())
    if len(make_tasks(documents, [[]], objectives[:1], LENGTH, END).tasks[0].blocks if files else []) >= number:
        of_files = [token for task in rotation.tasks for token in read_by(task.blocks) if token >= OF_FILES]
        assert sorted(of_files) == sorted(token for document in documents for token in document if token != END)


def test_a_single_task_reads_all_documents() -> None:
    rotation = make_tasks([[END, 1, 2, 3], [END, 4]], [[]], [Unused()], LENGTH, END)
    assert read_by(rotation.tasks[0].blocks) == [1, 2, 3, 4]
    assert rotation.num_tokens == 6  # the end tokens of both are predicted too
