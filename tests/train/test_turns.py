"""Each temperature's steps read what the target wrote at it, and their share of the files; together, everything once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.train.blocks import NOTHING, Blocks
from foredraft.train.losses import Measure
from foredraft.train.turns import dealt

LENGTH, END = 4, 0
OF_FILES = 100
"""Tokens of files are from here on; those that were written for objective n are n + 1."""


class Named:
    """An objective that is only told from others."""

    def __call__(self, student: PreTrainedModel, ids: Tensor, following: Tensor, progress: float) -> Measure:
        raise AssertionError("nothing is trained here")


def read_by(blocks: Blocks) -> list[int]:
    return [token for token in blocks.following.flatten().tolist() if token not in (NOTHING, END)]


@given(
    st.lists(st.integers(1, 30), max_size=6),
    st.lists(st.integers(1, 30), min_size=3, max_size=12),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_a_turn_reads_its_own_texts(
    files: list[int], written: list[int], number: int, seed: int, batch_size: int
) -> None:
    """The lengths of files, and of texts of the target's own: what is read is all that there is, each in its turn."""
    objectives = [Named() for _ in range(number)]
    documents = [[END, *range(OF_FILES, OF_FILES + size)] for size in files]
    generated = [[END, *[n % number + 1] * size] for n, size in enumerate(written)]
    turns = dealt(documents, generated, objectives, LENGTH, END)
    found: list[Tensor] = []
    for place, turn in enumerate(turns.turns):
        own = [token for token in read_by(turn.blocks) if token < OF_FILES]
        assert own == [place + 1] * sum(written[place::number])
        for step in range(place, number * len(turn.blocks), number):  # so many epochs of it as a batch has blocks
            some = turns.at(seed, step, batch_size)
            assert some.objective is objectives[place]
            assert len(some.blocks) == batch_size
            found.append(some.blocks.ids)
    assert sum(len(ids) for ids in found) == turns.num_blocks * batch_size
    whole = torch.cat([turn.blocks.ids for turn in turns.turns]).repeat(batch_size, 1)
    assert sorted(torch.cat(found).tolist()) == sorted(whole.tolist())
    if len(dealt(documents, [], objectives[:1], LENGTH, END).turns[0].blocks if files else []) >= number:
        of_files = [token for turn in turns.turns for token in read_by(turn.blocks) if token >= OF_FILES]
        assert sorted(of_files) == sorted(token for document in documents for token in document if token != END)


def test_one_turn_of_files_is_all_of_them() -> None:
    turns = dealt([[END, 1, 2, 3], [END, 4]], [], [Named()], LENGTH, END)
    assert read_by(turns.turns[0].blocks) == [1, 2, 3, 4]
    assert turns.num_tokens == 6  # the ends of both are predicted too
