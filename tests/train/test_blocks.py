"""Packing loses no token, and the order of blocks depends only on the seed and the step."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import ForedraftError
from foredraft.train.blocks import IGNORED, batch_indices, pack

documents = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=9), min_size=1, max_size=8)


@given(documents, st.integers(1, 7))
def test_every_token_is_predicted_once_and_by_its_own_past(found: list[list[int]], length: int) -> None:
    stream = [token for document in found for token in [0, *document]] + [0]
    blocks = pack([[0, *document] for document in found], length, 0)
    assert blocks.ids.shape == blocks.next_ids.shape
    assert blocks.ids.shape[1] == length
    read, next_ids = blocks.ids.flatten().tolist(), blocks.next_ids.flatten().tolist()
    pairs = [(a, b) for a, b in zip(read, next_ids, strict=True) if b != IGNORED]
    assert pairs == list(pairwise(stream))
    assert blocks.num_tokens == len(stream) - 1
    assert next_ids.count(IGNORED) < length


@pytest.mark.parametrize("found", [[], [[]], [[5]]])
def test_nothing_to_predict_is_refused(found: list[list[int]]) -> None:
    with pytest.raises(ForedraftError, match="no text to train on"):
        pack(found, 8, None)


@given(documents, st.integers(1, 9))
def test_given_tokens_are_read_but_not_predicted(found: list[list[int]], length: int) -> None:
    found = [[0, *document] for document in found]
    whole = pack(found, length, None)
    is_given = [place < len(document) // 2 for document in found for place in range(len(document))]
    padding = [True] * (whole.next_ids.numel() - len(is_given) + 1)
    expected = [
        IGNORED if given else token
        for given, token in zip([*is_given[1:], *padding], whole.next_ids.flatten().tolist(), strict=True)
    ]
    rows = zip(whole.ids.tolist(), batched(expected, length), strict=True)
    blocks = pack(found, length, None, lambda document: len(document) // 2)
    kept = [(ids, next_ids) for ids, next_ids in rows if set(next_ids) != {IGNORED}]
    assert list(zip(blocks.ids.tolist(), blocks.next_ids.tolist(), strict=True)) == kept


def batched(numbers: list[int], length: int) -> list[list[int]]:
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def test_a_text_with_only_given_tokens_is_refused() -> None:
    with pytest.raises(ForedraftError, match="none is left to predict"):
        pack([[1, 2, 3]], 2, None, len)


@given(st.integers(0, 5), st.integers(1, 13), st.integers(1, 5))
def test_an_epoch_reads_every_block_once(seed: int, num_blocks: int, batch_size: int) -> None:
    indices = [index for step in range(3 * num_blocks) for index in batch_indices(seed, step, batch_size, num_blocks)]
    for epoch in range(3 * batch_size):
        assert sorted(indices[epoch * num_blocks : (epoch + 1) * num_blocks]) == list(range(num_blocks))


def test_the_blocks_of_a_step_do_not_depend_on_earlier_calls() -> None:
    wanted = [batch_indices(1, step, 3, 10) for step in range(12)]
    assert [batch_indices(1, step, 3, 10) for step in reversed(range(12))] == wanted[::-1]
    assert wanted != [batch_indices(2, step, 3, 10) for step in range(12)]
