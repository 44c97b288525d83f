"""Packing loses no token, and which block comes when depends on the seed and the step alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import ForedraftError
from foredraft.train.blocks import NOTHING, batch_places, packed

documents = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), min_size=1, max_size=8)


@given(documents, st.integers(1, 7))
def test_every_token_is_predicted_once_and_by_its_own_past(found: list[list[int]], length: int) -> None:
    stream = [token for document in found for token in [0, *document]] + [0]
    blocks = packed([[0, *document] for document in found], length, 0)
    assert blocks.ids.shape == blocks.following.shape
    assert blocks.ids.shape[1] == length
    read, following = blocks.ids.flatten().tolist(), blocks.following.flatten().tolist()
    pairs = [(a, b) for a, b in zip(read, following, strict=True) if b != NOTHING]
    assert pairs == list(pairwise(stream))
    assert blocks.num_tokens == len(stream) - 1
    assert following.count(NOTHING) < length


@pytest.mark.parametrize("found", [[], [[]], [[5]]])
def test_nothing_to_predict_is_refused(found: list[list[int]]) -> None:
    with pytest.raises(ForedraftError, match="no text to train on"):
        packed(found, 8, None)


@given(st.integers(0, 5), st.integers(1, 13), st.integers(1, 5))
def test_an_epoch_reads_every_block_once(seed: int, num_blocks: int, batch_size: int) -> None:
    places = [place for step in range(3 * num_blocks) for place in batch_places(seed, step, batch_size, num_blocks)]
    for epoch in range(3 * batch_size):
        assert sorted(places[epoch * num_blocks : (epoch + 1) * num_blocks]) == list(range(num_blocks))


def test_a_step_is_the_same_whatever_was_asked_before() -> None:
    wanted = [batch_places(1, step, 3, 10) for step in range(12)]
    assert [batch_places(1, step, 3, 10) for step in reversed(range(12))] == wanted[::-1]
    assert wanted != [batch_places(2, step, 3, 10) for step in range(12)]
