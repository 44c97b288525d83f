"""Regions of a cache: which prefix they keep, and in which slots rows are."""

from __future__ import annotations

from typing import Any, SupportsIndex

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.region import KEY_MULTIPLE, Region
from tests.engine.regions import keys_of, write

short = st.lists(st.integers(0, 2), max_size=12)


@given(held=short, wanted=short, at_most=st.none() | st.integers(0, 14))
def test_keep_prefix_of_is_absolute_and_idempotent(held: list[int], wanted: list[int], at_most: int | None) -> None:
    region = Region()
    region.tokens = list(held)
    common = next(
        (i for i, (a, b) in enumerate(zip(held, wanted, strict=False)) if a != b), min(len(held), len(wanted))
    )
    kept = common if at_most is None else min(common, at_most)
    for _ in range(3):
        assert region.keep_prefix_of(wanted, at_most) == len(wanted) - kept
        assert region.tokens == wanted[:kept]


@given(held=short, wanted=short)
def test_keep_prefix_of_takes_any_sequence(held: list[int], wanted: list[int]) -> None:
    as_list, as_tuple = Region(), Region()
    as_list.tokens, as_tuple.tokens = list(held), list(held)
    assert as_tuple.keep_prefix_of(tuple(wanted)) == as_list.keep_prefix_of(wanted)
    assert as_tuple.tokens == as_list.tokens


@given(
    rounds=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=5), st.lists(st.integers(0, 1), min_size=1, max_size=5))
    )
)
def test_keep_prefix_of_follows_a_history_that_grows(rounds: list[tuple[list[int], list[int]]]) -> None:
    """As in generation: read a draft, commit other tokens, drop the rest. The region remembers how far it has compared the history; it
    must agree with a new region."""
    region, history = Region(), [1, 0]
    for draft, committed in rounds:
        unread = region.keep_prefix_of(history, at_most=len(history) - 1)
        region.tokens += [*history[len(history) - unread :], *draft]
        held = list(region.tokens)
        history += committed
        fresh = Region()
        fresh.tokens = held
        assert region.keep_prefix_of(history) == fresh.keep_prefix_of(list(history))
        assert region.tokens == fresh.tokens


def test_a_different_history_is_compared_from_its_beginning() -> None:
    region, first = Region(), [1, 2, 3, 4]
    region.tokens = [1, 2, 3, 4]
    assert region.keep_prefix_of(first) == 0
    assert region.keep_prefix_of([9, 2, 3, 4]) == 4
    assert region.tokens == []


class CountingList(list[int]):
    """Counts how many of its items are accessed."""

    looked_at = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        self.looked_at += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        for i in range(len(self)):
            yield self[i]


def test_keep_prefix_of_reads_only_the_new_tokens() -> None:
    """A thousand rounds of three tokens, up to a history of four thousand: rescanning would read millions."""
    history = CountingList(range(1000))
    region = Region()
    region.tokens = list(range(1000))
    region.keep_prefix_of(history)
    history.looked_at = 0
    for step in range(1000):
        region.tokens += [5, 6, 7, 8]  # a draft of four, read
        history += [5, 6, 9000 + step]  # two of which are accepted
        assert region.keep_prefix_of(history) == 1
        region.tokens.append(history[-1])
    assert history.looked_at <= 12 * 4 * 1000


def test_rows_may_be_in_other_slots_than_their_positions() -> None:
    """`along` returns rows in the order of a path, padded with zeros. Rows in other slots do not change."""
    region = Region()
    region.resize(32)
    write(region, [1, 2, 3])
    keys = keys_of([1, 2, 3, 4, 5, 6])
    region.write_to(0, keys[:, 3:], torch.cat([keys, keys], dim=2)[:, 3:], [20, 7, 9])
    seen, _ = region.along(0, 3, [20, 7, 9])
    assert seen.shape == (1, KEY_MULTIPLE, 2)
    assert torch.equal(seen[:, :6], keys)
    assert not seen[:, 6:].any()
    assert torch.equal(region.along(0, 3, [9])[0][:, :4], keys[:, [0, 1, 2, 5]])
    region.tokens = [0] * 32
    held = region.layer(0)[0]
    assert torch.equal(held[:, [0, 1, 2, 20, 7, 9]], keys)
    assert not held[:, [3, 4, 5, 6, 8, 10]].any()


def test_bytes_per_token_are_computed_from_the_written_layers() -> None:
    region = Region()
    region.resize(64)
    write(region, [1])
    assert region.bytes_per_token == 2 * (2 + 4) * 4


def test_kernels_write_features_of_one_width() -> None:
    region = Region()
    region.resize(16)
    address = region.features_address(6)
    assert region.features is not None
    assert (address, region.features.shape, region.features.dtype) == (
        region.features.data_ptr(),
        (16, 6),
        torch.bfloat16,
    )
    with pytest.raises(ValueError, match="features have 6 columns, not 4"):
        region.features_address(4)


@pytest.mark.parametrize("num_behind", [0, 1], ids=["in one piece", "with a layer behind"])
def test_rows_move_and_grow_alike_however_layers_are_stored(num_behind: int) -> None:
    """For kernels all layers are in one tensor; a layer that is written later has its own."""
    region = Region()
    region.resize(16)
    region.addresses(3, torch.empty(2, 0, 4))
    for layer in range(3 + num_behind):
        numbers = torch.arange(2 * 16 * 4.0).view(2, 16, 4) + 1000 * layer
        region.write(layer, numbers, -numbers, 0)
    region.write_features(torch.arange(16.0)[:, None], 0)
    region.tokens = list(range(6))
    addresses = region.addresses(3, torch.empty(2, 0, 4))
    before = [region.layer(layer)[0].clone() for layer in range(3 + num_behind)]
    region.move_rows([2, 5], 1)
    region.resize(32)
    assert region.addresses(3, torch.empty(2, 0, 4)) != addresses
    assert region.features is not None
    assert region.features[:6, 0].tolist() == [0, 2, 5, 3, 4, 5]
    for layer, keys in enumerate(before):
        held = region.layer(layer)
        assert torch.equal(held[0], keys[:, [0, 2, 5, 3, 4, 5]])
        assert torch.equal(held[1], -held[0])
        assert layer == 3 or held[0].data_ptr() == region.addresses(3, keys)[2 * layer]
