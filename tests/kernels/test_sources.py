"""Reading weights in blocks of rows gives the same as reading the whole, however weights are joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.kernels import (
    Alternating,
    InMemory,
    Interleaved,
    Joined,
    QuantizedWeight,
    Reordered,
    RowSlice,
    Weight,
    WeightSource,
    blocks_of,
    dequantized,
    quantize_int4,
    quantize_int8,
    read_all,
)


def random_weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def grouped(n: int, k: int, group: int, *, bits: int = 8, has_offsets: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(n + k + group)
    most = 1 << (bits - 1)
    codes = torch.randint(-most, most, (n, k), generator=generator, dtype=torch.int8)
    scales = torch.rand(n, k // group, generator=generator)
    offsets = torch.randn(n, k // group, generator=generator) if has_offsets else None
    return QuantizedWeight(codes, scales, offsets, group, bits)


def rebuilt(source: WeightSource, step: int) -> Tensor:
    n = source.shape[0]
    return torch.cat([dequantized(source.rows(first, min(first + step, n))) for first in range(0, n, step)])


@pytest.mark.parametrize(
    "parts",
    [
        [random_weight(70, 64), random_weight(5, 64, 1)],
        [grouped(70, 64, 32), grouped(33, 64, 32, has_offsets=True)],
        [grouped(70, 64, 32, bits=4), grouped(33, 64, 16)],
        [grouped(70, 64, 64, bits=4), grouped(33, 64, 32, bits=4)],
        [random_weight(70, 64), grouped(33, 64, 32)],
    ],
)
def test_joined_weights_are_concatenated(parts: list[Weight]) -> None:
    joined = Joined([InMemory(part) for part in parts])
    expected = torch.cat([dequantized(part) for part in parts])
    assert joined.shape == tuple(expected.shape)
    assert torch.equal(dequantized(read_all(joined)), expected)
    assert torch.equal(rebuilt(joined, 64), expected)


def test_joined_weights_are_in_four_bits_only_if_all_are() -> None:
    four, eight = grouped(64, 64, 32, bits=4), grouped(64, 64, 32)
    alike, mixed = (read_all(Joined([InMemory(four), InMemory(other)])) for other in (four, eight))
    assert isinstance(alike, QuantizedWeight)
    assert isinstance(mixed, QuantizedWeight)
    assert (alike.bits, mixed.bits) == (4, 8)


@pytest.mark.parametrize("num_rows", [32, 70, 96])
def test_gates_and_values_alternate(num_rows: int) -> None:
    gate, up = grouped(num_rows, 64, 32), grouped(num_rows, 64, 32, has_offsets=True)
    source = Interleaved(InMemory(gate), InMemory(up))
    numbers = dequantized(read_all(source)).view(-1, 2, 32, 64)
    padding = torch.zeros(-num_rows % 32, 64)
    assert torch.equal(numbers[:, 0].flatten(0, 1), torch.cat([gate.dequantized(), padding]))
    assert torch.equal(numbers[:, 1].flatten(0, 1), torch.cat([up.dequantized(), padding]))
    assert torch.equal(rebuilt(source, 64), numbers.flatten(0, 2))


@pytest.mark.parametrize(("first", "end"), [(0, 14), (3, 8), (4, 5), (6, 6)])
def test_rows_of_two_weights_are_interleaved(first: int, end: int) -> None:
    a, b = torch.randn(7, 32), torch.randn(7, 32)
    for weights in ((a, b), (quantize_int4(a), quantize_int8(b))):
        source = Alternating(*(InMemory(weight) for weight in weights))
        assert source.shape == (14, 32)
        expected = torch.stack([dequantized(weight) for weight in weights], 1).flatten(0, 1)[first:end]
        torch.testing.assert_close(dequantized(source.rows(first, end)), expected)


def test_gates_and_values_are_read_in_whole_blocks() -> None:
    source = Interleaved(InMemory(random_weight(70, 8)), InMemory(random_weight(70, 8)))
    with pytest.raises(ValueError, match="blocks of 64"):
        source.rows(0, 10)


def test_a_weight_in_memory_is_converted_in_blocks() -> None:
    weight = random_weight(300, 40)
    whole = quantize_int8(weight)
    source = InMemory(weight, quantize_int8)
    blocks = [(first, block) for first, block in blocks_of(source)]
    assert blocks[0][0] == 0
    codes = [block.codes for _, block in blocks if isinstance(block, QuantizedWeight)]
    assert torch.equal(torch.cat(codes), whole.codes)
    assert torch.equal(rebuilt(source, 64), whole.dequantized())


@pytest.mark.parametrize("step", [7, 64, 100])
def test_a_slice_has_the_rows_it_names(step: int) -> None:
    weight = random_weight(100, 8)
    assert torch.equal(rebuilt(RowSlice(InMemory(weight), 13, 90), step), weight[13:90])
    quantized = grouped(100, 8, 4, has_offsets=True)
    assert torch.equal(rebuilt(RowSlice(InMemory(quantized), 13, 90), step), quantized.dequantized()[13:90])


@pytest.mark.parametrize("step", [7, 64, 108])
def test_rows_of_each_head_are_reordered(step: int) -> None:
    weight, order = random_weight(108, 8), torch.randperm(18, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([head[order] for head in weight.split(18)])
    assert torch.equal(rebuilt(Reordered(InMemory(weight), order), step), expected)
    quantized = quantize_int8(weight)
    expected = torch.cat([head[order] for head in quantized.dequantized().split(18)])
    assert torch.equal(rebuilt(Reordered(InMemory(quantized), order), step), expected)
