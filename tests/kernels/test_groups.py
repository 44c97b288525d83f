"""Products with weights that have scales by groups of inputs, compared with plain numbers, and what the bits of a row depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels import Joined, Kernels, QuantizedWeight, linear_grouped, quantize_int4, quantize_int8, read_all
from foredraft.kernels.sources import InMemory
from foredraft.kernels.weights import INT4_GROUPS, INT8, INT8_GROUPS, LEVEL_GROUPS

IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
MXFP4 = torch.tensor([-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
LAYOUTS = [
    *((4, group, has_offsets, None) for group in (16, 32, 64, 128) for has_offsets in (False, True)),
    (4, 40, False, None),
    (4, 32, False, IQ4),
    (4, 32, True, IQ4),
    (4, 32, False, MXFP4),
    (4, 64, False, IQ4),
    *((8, group, has_offsets, None) for group in (16, 32, 64, 128) for has_offsets in (False, True)),
]
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout[:3])))


def random_weight(
    n: int, num_groups: int, layout: tuple[int, int, bool, Tensor | None], *, seed: int = 0, largest: float = 1.0
) -> QuantizedWeight:
    """A random weight whose scales and offsets float16 can represent."""
    bits, group, has_offsets, levels = layout
    generator = torch.Generator().manual_seed(seed)
    most = 1 << (bits - 1)
    codes = torch.randint(-most, most, (n, num_groups * group), generator=generator, dtype=torch.int8)
    if levels is not None:
        codes = levels[codes.long() + most]
    shape = (n, num_groups)
    scales = (largest * (torch.rand(shape, generator=generator) + 0.01)).half().float()
    offsets = largest * torch.randn(shape, generator=generator).half().float() if has_offsets else None
    if offsets is not None and bits == 4 and levels is None:
        offsets = offsets + 8 * scales
    return QuantizedWeight(codes, scales, offsets, group, bits, levels)


def random_rows(num_rows: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, k, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def error(kernels: Kernels, weight: QuantizedWeight, x: Tensor) -> float:
    """The largest error of a row [1, k], relative to the sum of the magnitudes of the terms. A bias subtracts the expected result before
    the rounding to bfloat16."""
    expected = linear_grouped(weight, x, kernels.pack(weight).row_steps)
    rest = kernels.linear(kernels.pack(weight, -expected[0].float()), x).double() + (expected.float() - expected)
    size = x.double().abs() @ weight.dequantized().double().abs().T
    return float((rest.abs() / size.clamp(min=1e-30)).max())


@by_layout
def test_products_are_those_of_plain_numbers(kernels: Kernels, layout: tuple[int, int, bool, Tensor | None]) -> None:
    weight = random_weight(100, 3, layout)
    for row in random_rows(3, weight.shape[1]).split(1):
        assert error(kernels, weight, row) < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    n=st.integers(1, 140),
    num_groups=st.integers(1, 9),
    extreme=st.sampled_from([1.0, 1e-20, 1e20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_any_shape_are_right(
    kernels: Kernels,
    layout: tuple[int, int, bool, Tensor | None],
    n: int,
    num_groups: int,
    extreme: float,
    seed: int,
) -> None:
    weight = random_weight(n, num_groups, layout, seed=seed)
    x = random_rows(1, weight.shape[1], seed) * extreme
    assert error(kernels, weight, x) < 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, 512, 4096])
def test_the_largest_codes_do_not_saturate(kernels: Kernels, bits: int, group: int) -> None:
    """Of one sign, and of signs that alternate by single inputs and by pairs, which some instructions add up in 16 bits."""
    most = 1 << (bits - 1)
    signs = [torch.ones(4096), *(1 - 2 * (torch.arange(4096) // run % 2) for run in (1, 2))]
    codes = [torch.where(sign == side, most - 1, -most) for sign in signs for side in (1, -1)]
    scales = torch.full((len(codes), 4096 // group), 0.5)
    weight = QuantizedWeight(torch.stack(codes).to(torch.int8), scales, None, group, bits)
    for sign in signs:
        for side in (1, -1):
            x = (side * sign)[None].to(torch.bfloat16)
            assert error(kernels, weight, x) < 1e-7


@pytest.mark.parametrize("k", [256, 6400])  # with AVX2, blocks of rows multiply 6,400 inputs part by part
@by_layout
def test_a_row_has_the_same_bits_in_every_batch_and_number_of_threads(
    kernels: Kernels, layout: tuple[int, int, bool, Tensor | None], k: int
) -> None:
    matrix = kernels.pack(random_weight(200, k // layout[1], layout), torch.randn(200))
    x = random_rows(70, matrix.in_features)
    whole = kernels.linear(matrix, x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for count in (*range(1, 17), 23, 33, 47, 64):
            assert torch.equal(kernels.linear(matrix, x[3 : 3 + count]), whole[3 : 3 + count])


@by_layout
@pytest.mark.parametrize("num_groups", [1, 3, 6])
@pytest.mark.parametrize("factor", [1.0, 1 / 3], ids=["float16", "float32"])
def test_a_row_has_the_same_bits_with_scales_of_either_type(
    kernels: Kernels, layout: tuple[int, int, bool, Tensor | None], num_groups: int, factor: float
) -> None:
    weight = random_weight(70, num_groups, layout)
    offsets = None if weight.offsets is None else weight.offsets * factor
    bits, group, _, levels = layout
    matrix = kernels.pack(QuantizedWeight(weight.codes, weight.scales * factor, offsets, group, bits, levels))
    x = random_rows(48, matrix.in_features)
    alone = torch.cat([kernels.linear(matrix, row) for row in x.split(1)])
    for count in (13, 16, 23, 48):
        assert torch.equal(kernels.linear(matrix, x[:count]), alone[:count])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [128, 256, 512, 2048])
def test_the_largest_sums_have_the_same_bits_in_every_batch(kernels: Kernels, bits: int, group: int) -> None:
    codes = torch.full((4, 2048), -(1 << (bits - 1)), dtype=torch.int8)
    matrix = kernels.pack(QuantizedWeight(codes, torch.full((4, 2048 // group), 0.5), None, group, bits))
    x = torch.ones(48, 2048, dtype=torch.bfloat16) * torch.tensor([[1.0], [-1.0]]).repeat(24, 1).to(torch.bfloat16)
    alone = torch.cat([kernels.linear(matrix, row) for row in x.split(1)])
    assert torch.equal(kernels.linear(matrix, x), alone)


@by_layout
def test_packed_rows_can_be_unpacked(kernels: Kernels, layout: tuple[int, int, bool, Tensor | None]) -> None:
    weight = random_weight(100, 3, layout)
    ids = torch.tensor([[99, 0, 64], [63, 1, 64]])
    rows = kernels.rows(kernels.pack(weight), ids)
    torch.testing.assert_close(rows, weight.dequantized()[ids], rtol=1e-6, atol=1e-6)


def test_packed_rows_of_other_formats_can_be_unpacked(kernels: Kernels) -> None:
    weight = torch.randn(100, 37)
    ids = torch.arange(100)
    assert torch.equal(kernels.rows(kernels.pack(weight), ids), weight.bfloat16().float())
    quantized = quantize_int8(weight)
    assert torch.equal(kernels.rows(kernels.pack(quantized), ids), quantized.dequantized())
    with pytest.raises(ValueError, match="rows must be from 0 to 99: got 100 to 100"):
        kernels.rows(kernels.pack(weight), torch.tensor([100]))


@by_layout
def test_blocks_of_rows_give_the_matrix_of_the_whole(
    kernels: Kernels, layout: tuple[int, int, bool, Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random_weight(200, 3, layout)
    whole = kernels.pack(weight)
    monkeypatch.setattr("foredraft.kernels.sources._NUMBERS_AT_A_TIME", 1)
    assert torch.equal(kernels.pack(InMemory(weight)).tensors["weights"], whole.tensors["weights"])


def test_scales_are_stored_in_float16_only_if_in_its_range(kernels: Kernels) -> None:
    for largest, scale_bytes in ((1.0, 2), (1e-9, 4), (1e9, 4)):
        weight = random_weight(70, 2, (4, 32, False, None))
        weight = weight._replace(scales=weight.scales * largest)
        matrix = kernels.pack(weight)
        assert matrix.layout.scale_bytes == scale_bytes
        assert error(kernels, weight, random_rows(1, 64)) < 1e-6


def test_one_block_whose_scales_do_not_fit_float16_decides(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.kernels.sources._NUMBERS_AT_A_TIME", 1)
    weight = random_weight(200, 2, (8, 32, False, None))
    weight.scales[150, 1] = 1e-9
    assert kernels.pack(weight).layout.scale_bytes == 4
    assert error(kernels, weight, random_rows(1, 64)) < 1e-6


def test_weights_in_different_formats_are_joined(kernels: Kernels) -> None:
    four, eight = random_weight(70, 4, (4, 32, False, None)), random_weight(33, 8, (8, 16, False, None))
    parts = [four._replace(offsets=torch.randn(70, 4).half().float()), eight]
    source = Joined([InMemory(part) for part in parts])
    joined, whole = kernels.pack(source), read_all(source)
    assert isinstance(whole, QuantizedWeight)  # they are in groups of 16, and so are the rows
    x = random_rows(5, 128)
    expected = linear_grouped(whole, x, joined.row_steps)
    size = x.double().abs() @ torch.cat([part.dequantized() for part in parts]).double().abs().T
    assert ((kernels.linear(joined, x).double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6 * size).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_never_give_finite_results(kernels: Kernels, bad: float) -> None:
    weight = random_weight(70, 2, (4, 32, False, None))
    x = random_rows(5, 64)
    good = kernels.linear(kernels.pack(weight), x)
    x[3, 40] = bad
    spoiled = kernels.linear(kernels.pack(weight), x)
    others = torch.arange(5) != 3
    assert not spoiled[3].isfinite().any()
    assert torch.equal(spoiled[others], good[others])


def test_each_layout_has_its_kind(kernels: Kernels) -> None:
    kinds = [(LAYOUTS[0], INT4_GROUPS), ((4, 32, False, IQ4), LEVEL_GROUPS), ((8, 32, False, None), INT8_GROUPS)]
    assert [kernels.pack(random_weight(4, 2, layout)).layout.kind for layout, _ in kinds] == [kind for _, kind in kinds]
    assert kernels.pack(quantize_int8(torch.randn(4, 64))).layout.kind == INT8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "not 3 bits in groups of 32 for 64 inputs"),
        ({"group": 48}, "not 4 bits in groups of 48"),
        ({"group": 4, "scales": torch.ones(4, 16)}, "not 4 bits in groups of 4"),
        ({"codes": torch.full((4, 64), 8, dtype=torch.int8)}, "256 codes of a four-bit weight are neither"),
        ({"levels": IQ4}, "codes of a four-bit weight are neither from -8 to 7 nor among its levels"),
    ],
)
def test_weights_without_a_kernel_are_refused(kernels: Kernels, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.pack(random_weight(4, 2, (4, 32, False, None))._replace(**change))  # type: ignore[arg-type]


def test_four_bit_codes_are_the_nearest_values() -> None:
    """The largest magnitude of a group is exactly code -8; others are within half a step, except at the other end of the range."""
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    quantized = quantize_int4(weight)
    assert (quantized.group, quantized.bits, quantized.offsets) == (32, 4, None)
    groups = weight.float().view(70, 3, 32)
    codes = quantized.codes.view(70, 3, 32)
    assert (codes.amin(2) == -8).all()
    assert torch.equal(8 * quantized.scales.abs(), groups.abs().amax(2))
    steps = (groups / quantized.scales[..., None]).clamp(-8, 7)
    assert ((steps - codes).abs() <= 0.5).all()


def test_quantizing_quantized_weights_changes_nothing() -> None:
    once = quantize_int4(torch.randn(70, 96))
    twice = quantize_int4(once.dequantized())
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.scales, twice.scales)


def test_zero_and_tiny_weights_are_kept() -> None:
    assert torch.equal(quantize_int4(torch.zeros(2, 64)).dequantized(), torch.zeros(2, 64))
    tiny = quantize_int4(torch.full((2, 64), 1e-12))
    torch.testing.assert_close(tiny.dequantized(), torch.full((2, 64), 1e-12), rtol=1e-3, atol=0)


def test_layers_that_no_group_divides_are_in_eight_bits() -> None:
    weight = torch.randn(5, 40)
    assert torch.equal(quantize_int4(weight).codes, quantize_int8(weight).codes)
    assert quantize_int4(weight).bits == 8


def test_rows_are_rounded_to_more_bits_where_inner_loops_multiply_sixteen_bits(kernels: Kernels) -> None:
    """But not for four-bit weights, nor for groups whose sums would not fit 32 bits."""
    eight = kernels.pack(random_weight(64, 2, (8, 32, False, None)))
    assert eight.row_steps in (127, 32 * 127)
    assert kernels.pack(random_weight(64, 2, (4, 32, False, None))).row_steps == 127
    codes = torch.zeros(64, 2 * 8192, dtype=torch.int8)
    assert kernels.pack(QuantizedWeight(codes, torch.ones(64, 2), None, 8192, 8)).row_steps == 127
    x = random_rows(4, 32)
    identity = QuantizedWeight(torch.eye(32, dtype=torch.int8), torch.ones(32, 1), torch.zeros(32, 1), 32, 8)
    step = x.abs().amax(1, keepdim=True).float() / eight.row_steps
    rounded = kernels.linear(kernels.pack(identity), x)
    assert ((rounded.float() - x.float()).abs() <= 0.51 * step + 2.0**-8 * x.float().abs()).all()
