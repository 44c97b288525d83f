"""Products: in int8 compared with plain integers, in bfloat16 with float64, and what the bits of a row depend on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels import Kernels, WeightFormat, linear_int8, quantize_int8, unquantized
from foredraft.model.packed import Int8Linear, NativeLinear

ROW_COUNTS = range(1, 71)
by_format = pytest.mark.parametrize("weight_format", [unquantized, quantize_int8])
SHAPES = [(1, 1), (3, 2), (64, 4), (65, 17), (100, 67), (320, 33), (63, 300)]
PARTS = (70, 3100)  # with AVX2, several blocks of rows multiply a group of such long outputs part by part


def random_matrix(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random weight [n, k] and bias [n]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=generator), torch.randn(n, generator=generator)


def random_rows(num_rows: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, k, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 200),
    num_rows=st.integers(1, 20),
    has_bias=st.booleans(),
    extreme=st.sampled_from([1.0, 1e-30, 1e30]),
    seed=st.integers(0, 2**32 - 1),
)
@torch.inference_mode()
def test_int8_products_of_any_shape_are_exact(
    kernels: Kernels, n: int, k: int, num_rows: int, has_bias: bool, extreme: float, seed: int
) -> None:
    weight, bias = random_matrix(n, k, seed)
    weight[0] = 1.0
    weight[-1] = 0.0
    x = random_rows(num_rows, k, seed + 1) * extreme
    x[0] = 0.0
    x[-1] = extreme
    native = NativeLinear(kernels.pack(quantize_int8(weight), bias if has_bias else None), kernels)(x)
    if k > 1:  # PyTorch's integer product reads past the end of a matrix of one column
        assert torch.equal(native, Int8Linear(quantize_int8(weight), bias if has_bias else None)(x))
    if not has_bias:
        assert torch.equal(native, linear_int8(weight, x))


@pytest.mark.parametrize("num_rows", [9, 60])
def test_int8_products_of_long_rows_are_exact(kernels: Kernels, num_rows: int) -> None:
    weight, _ = random_matrix(*PARTS)
    x = random_rows(num_rows, PARTS[1])
    assert torch.equal(kernels.linear(kernels.pack(quantize_int8(weight)), x), linear_int8(weight, x))


@pytest.mark.parametrize("k", [50_001, 66_400, 130_000])
def test_int8_sums_that_temporarily_overflow_32_bits_are_exact(kernels: Kernels, k: int) -> None:
    """Bytes are stored with 128 added, so that the sums wrap before the correction wraps them back."""
    weight = torch.ones(2, k)
    weight[1] = -1.0
    x = torch.ones(3, k, dtype=torch.bfloat16)
    x[1] = -1.0
    x[2, ::2] = -1.0
    assert torch.equal(kernels.linear(kernels.pack(quantize_int8(weight)), x), linear_int8(weight, x))


@by_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 76])
def test_inputs_that_are_not_finite_never_give_finite_results(
    kernels: Kernels, weight_format: WeightFormat, bad: float, place: int
) -> None:
    """In a row of the left side it affects only that row, in the weights only that output."""
    weight, bias = random_matrix(70, 77)
    x = random_rows(5, 77)
    good = kernels.linear(kernels.pack(weight_format(weight), bias), x)
    x[3, place] = bad
    spoiled = kernels.linear(kernels.pack(weight_format(weight), bias), x)
    others = torch.arange(5) != 3
    assert not spoiled[3].isfinite().any()
    assert torch.equal(spoiled[others], good[others])
    weight[66, place] = bad
    columns = torch.arange(70) != 66
    spoiled = kernels.linear(kernels.pack(weight_format(weight), bias), x)
    assert not spoiled[:, 66].isfinite().any()
    assert torch.equal(spoiled[others][:, columns], good[others][:, columns])


@pytest.mark.parametrize("largest", [2.0**-133, 1e-38, 3e-37])
def test_rows_too_small_for_a_scale_give_almost_zero(kernels: Kernels, largest: float) -> None:
    """127 divided by such a number is infinite."""
    weight, _ = random_matrix(70, 77)
    x = (random_rows(2, 77).clamp(-1, 1) * largest).to(torch.bfloat16)
    out = kernels.linear(kernels.pack(quantize_int8(weight)), x)
    assert out.isfinite().all()
    assert out.abs().max() <= 77 * 4 * largest


@by_format
@pytest.mark.parametrize("shape", [*SHAPES, PARTS], ids=str)
def test_a_row_has_the_same_bits_in_every_batch_and_number_of_threads(
    kernels: Kernels, shape: tuple[int, int], weight_format: WeightFormat
) -> None:
    weight, bias = random_matrix(*shape)
    matrix = kernels.pack(weight_format(weight), bias)
    x = random_rows(ROW_COUNTS[-1] + 3, shape[1])
    whole = kernels.linear(matrix, x)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for count in ROW_COUNTS:
            assert torch.equal(kernels.linear(matrix, x[3 : 3 + count]), whole[3 : 3 + count])


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 200), k=st.integers(1, 600), num_rows=st.integers(1, 20), has_bias=st.booleans())
def test_bfloat16_products_are_close_to_float64(
    kernels: Kernels, n: int, k: int, num_rows: int, has_bias: bool
) -> None:
    weight, bias = random_matrix(n, k)
    weight = weight.to(torch.bfloat16)
    x = random_rows(num_rows, k)
    out = kernels.linear(kernels.pack(weight, bias if has_bias else None), x).double()
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((out - expected).abs() <= 2.0**-8 * expected.abs() + 1e-6 * size).all()


@by_format
def test_any_shapes_and_strides_of_the_left_side_are_accepted(kernels: Kernels, weight_format: WeightFormat) -> None:
    weight, bias = random_matrix(33, 21)
    matrix = kernels.pack(weight_format(weight), bias)
    x = random_rows(6, 21)
    expected = kernels.linear(matrix, x)
    assert torch.equal(kernels.linear(matrix, x.view(2, 3, 21)), expected.view(2, 3, 33))
    assert torch.equal(kernels.linear(matrix, x.T.contiguous().T), expected)
    assert torch.equal(kernels.linear(matrix, torch.cat([x, x], 1)[:, 21:]), expected)
    assert torch.equal(kernels.linear(matrix, x[0]), expected[0])
    assert kernels.linear(matrix, x[:0]).shape == (0, 33)


def test_pytorch_only_multiplies_its_own_quantized_weights() -> None:
    weight = quantize_int8(torch.ones(4, 8))
    for other in (
        weight._replace(bits=4),
        weight._replace(offsets=torch.zeros(4, 1)),
        weight._replace(scales=torch.ones(4, 2), group=4),
    ):
        with pytest.raises(ValueError, match="int8 products need symmetric 8-bit weights"):
            Int8Linear(other, None)


def test_int8_codes_and_scales_represent_the_weight() -> None:
    weight, _ = random_matrix(70, 77)
    quantized = quantize_int8(weight)
    assert (quantized.offsets, quantized.group, quantized.bits, quantized.levels) == (None, 77, 8, None)
    assert quantized.codes.abs().amax(1).tolist() == [127] * 70
    assert ((quantized.dequantized() - weight).abs() <= quantized.scales / 2 + 1e-6).all()


def test_inconsistent_arguments_are_refused(kernels: Kernels) -> None:
    matrix = kernels.pack(torch.ones(4, 8))
    for x in (torch.ones(1, 7, dtype=torch.bfloat16), torch.ones(1, 8)):
        with pytest.raises(ValueError, match="8 bfloat16"):
            kernels.linear(matrix, x)


def test_concurrent_calls_do_not_affect_each_other(kernels: Kernels) -> None:
    """Two engines in two threads share the kernels, and calls release the GIL."""
    jobs = []
    for seed, shape in enumerate([(640, 512), (320, 1024)]):
        matrix, x = kernels.pack(random_matrix(*shape, seed)[0]), random_rows(24, shape[1], seed)
        jobs.append((matrix, x, kernels.linear(matrix, x)))

    together = Barrier(2)

    def disturbed(job: int) -> int:
        matrix, x, expected = jobs[job]
        together.wait()
        return sum(not torch.equal(kernels.linear(matrix, x), expected) for _ in range(400))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(disturbed, range(2))) == [0, 0]
