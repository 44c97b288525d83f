"""Packing values in words, and groups of inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.model.quantized.packing import centered, group_size, input_order, unpacked, unpacked_range
from foredraft.model.quantized.tensors import UnreadableError
from tests.model.quantized.packers import in_order, pack_words, shuffled_groups


@given(st.sampled_from([4, 8]), st.lists(st.integers(0, 255), min_size=1, max_size=40), st.data())
def test_packed_values_are_unpacked(bits: int, numbers: list[int], data: st.DataObject) -> None:
    values = torch.tensor([[number % 2**bits for number in numbers]])
    words = pack_words(values, bits)
    assert torch.equal(unpacked(words, bits)[:, : len(numbers)].to(torch.int64), values)
    first = data.draw(st.integers(0, len(numbers)))
    end = data.draw(st.integers(first, len(numbers)))
    assert torch.equal(unpacked_range(words, bits, first, end).to(torch.int64), values[:, first:end])


@given(st.sampled_from([4, 8]), st.integers(0, 2**16))
def test_any_zero_point_is_exact(bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (3, 64), generator=generator)
    zeros = torch.randint(0, 2**bits + 1, (3, 2), generator=generator)
    scales = torch.rand(3, 2, generator=generator).half()
    weight = centered(values.to(torch.uint8), scales, zeros, bits)
    expected = (values.view(3, 2, 32) - zeros[..., None]).double() * scales.double()[..., None]
    assert torch.equal(weight.dequantized().double(), expected.view(3, 64))


def test_groups_are_equal() -> None:
    assert group_size("layer", 96, 3) == 32
    for num_groups in (0, 5):
        with pytest.raises(UnreadableError, match=f"layer: 96 inputs cannot be divided into {num_groups} equal groups"):
            group_size("layer", 96, num_groups)


def test_inputs_are_sorted_by_their_groups() -> None:
    groups = shuffled_groups(96, 32)
    order = input_order("layer", groups, 32)
    assert order is not None
    assert torch.equal(groups[order], in_order(96, 32))
    assert input_order("layer", in_order(96, 32), 32) is None


@pytest.mark.parametrize("group", [-1, 3, 2**31 - 1])
def test_a_group_that_does_not_exist_is_refused(group: int) -> None:
    groups = in_order(96, 32).to(torch.int32)
    groups[5] = group
    with pytest.raises(UnreadableError, match="its g_idx does not assign 32 inputs to each of 3 groups"):
        input_order("layer", groups, 32)
