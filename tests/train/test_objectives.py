"""How a batch is divided into passes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.train.blocks import IGNORED
from foredraft.train.objectives import blocks_at_once, micro_batches

HALF = 64


@given(
    st.lists(st.tuples(st.integers(1, HALF), st.integers(1, HALF)), min_size=1, max_size=40), st.integers(1, 1 << 17)
)
def test_passes_read_every_block_once_and_keep_to_their_size(sizes: list[tuple[int, int]], width: int) -> None:
    ids = torch.full((len(sizes), 2 * HALF), IGNORED)
    for row, (source, text) in zip(ids, sizes, strict=True):
        row[:source] = 1
        row[HALF : HALF + text] = 1
    pieces = list(micro_batches(ids, width))
    assert sorted(row for piece in pieces for row in piece) == list(range(len(sizes)))
    for piece in pieces:
        num_places = int((ids[piece] != IGNORED).any(0).sum())
        assert len(piece) <= blocks_at_once(num_places, width)


@given(st.integers(1, 40), st.integers(1, 1 << 17))
def test_full_blocks_are_read_in_their_order(num_blocks: int, width: int) -> None:
    pieces = list(micro_batches(torch.ones(num_blocks, 2 * HALF), width))
    assert [row for piece in pieces for row in piece] == list(range(num_blocks))


def test_short_blocks_share_a_pass() -> None:
    ids = torch.full((32, 512), IGNORED)
    ids[:, :16] = 1
    assert len(list(micro_batches(ids, 4096))) == 1
    assert len(list(micro_batches(torch.ones(32, 512), 4096))) == 8
