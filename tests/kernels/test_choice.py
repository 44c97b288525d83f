"""The largest and the most likely ids of a row, compared with sorting in float64, with ties, infinities and NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels import DrawSpec, Kernels
from foredraft.sampling.noise import exponentials, stream_keys
from tests.laws import dense_law

WIDTHS = [*range(1, 36), 63, 64, 65, 100, 127, 128, 129, 199, 200, 4095, 4096, 4097, 70_001]


def random_logits(num_rows: int, width: int, levels: int = 10**9, seed: int = 0) -> Tensor:
    """Random logits. levels: how many different values they have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-levels, levels, (num_rows, width), generator=generator).float() * (8 / levels)


def first_largest(x: Tensor) -> list[int]:
    rows = x.double().tolist()
    return [row.index(max(row)) for row in rows]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("levels", [1, 10**9])
def test_argmax_is_the_first_of_the_largest(kernels: Kernels, width: int, levels: int) -> None:
    x = random_logits(3, width, levels)
    assert kernels.argmax(x).tolist() == first_largest(x)
    assert kernels.argmax(x.bfloat16()).tolist() == first_largest(x.bfloat16())
    assert kernels.argmax(x.bfloat16().float()).tolist() == first_largest(x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33, 200, 5000])
def test_argmax_of_nan_and_of_infinities(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    for place in {0, width // 2, width - 1}:
        x = random_logits(4, width).to(dtype)
        x[0], x[1], x[3] = -torch.inf, -torch.inf, torch.inf
        x[1, place] = -3e38
        x[2, place] = torch.nan
        x[2, -1] = torch.nan
        x[3, place] = torch.nan
        assert kernels.argmax(x).tolist() == [0, place, place, place]
    zeros = torch.zeros(1, width, dtype=dtype)
    zeros[:, 0] = -0.0
    assert kernels.argmax(zeros).tolist() == [0]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_are_independent(kernels: Kernels, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    x = random_logits(9, 30_000)
    x[4, 77] = torch.nan
    temperatures = torch.linspace(0.3, 2.0, 9)
    probs, ids = kernels.top(x, temperatures, 70)
    for r in range(9):
        alone, alone_ids = kernels.top(x[r : r + 1], temperatures[r : r + 1], 70)
        assert torch.equal(alone.nan_to_num(2.0)[0], probs[r].nan_to_num(2.0))
        assert torch.equal(alone_ids[0], ids[r])
        assert kernels.argmax(x[r : r + 1])[0] == kernels.argmax(x)[r]
    assert probs[4].isnan().all()
    assert not probs[torch.arange(9) != 4].isnan().any()


@settings(max_examples=80, deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    levels=st.sampled_from([1, 3, 200, 10**9]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 4.0]),
    count=st.sampled_from([1, 2, 16, 17, 64, 100, 4096]),
    hidden=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_most_likely_ids_are_those_of_a_sort_in_float64(
    kernels: Kernels, width: int, levels: int, temperature: float, count: int, hidden: bool, seed: int
) -> None:
    count = min(count, width)
    x = random_logits(2, width, levels, seed).bfloat16().float()
    if hidden:
        x[:, 1::2] = -torch.inf
    probs, ids = kernels.top(x, torch.full((2,), temperature), count)
    order = x.double().sort(dim=-1, descending=True, stable=True)
    expected = (x.double() / temperature).softmax(-1).gather(1, order.indices)
    assert torch.equal(ids, order.indices[:, :count])
    assert (probs.double() - expected[:, :count]).abs().max() <= 1e-6
    assert (probs.diff(dim=-1) <= 0).all()
    again, again_ids = kernels.top(x.bfloat16(), torch.full((2,), temperature), count)
    assert torch.equal(again, probs)
    assert torch.equal(again_ids, ids)


def test_each_row_has_its_own_temperature(kernels: Kernels) -> None:
    x = random_logits(3, 500)
    temperatures = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    probs, ids = kernels.top(x, temperatures, 500)
    expected = (x.double() / temperatures[:, None]).softmax(-1)
    assert (torch.zeros(3, 500).scatter(1, ids, probs).double() - expected).abs().max() <= 1e-6
    assert probs[0, 0] > probs[1, 0] > probs[2, 0]


@pytest.mark.parametrize("width", [3, 70, 6000])
def test_rows_without_a_distribution_are_nan_everywhere(kernels: Kernels, width: int) -> None:
    """Rows of only -inf, or with a NaN; the draw reports them."""
    x = random_logits(3, width)
    x[0] = -torch.inf
    x[1, width - 1] = torch.nan
    x[2, 0] = torch.inf
    probs, ids = kernels.top(x, torch.ones(3), 3)
    assert probs[:2].isnan().all()
    assert probs[2, 0].isnan()
    assert ((ids >= 0) & (ids < width)).all()


def test_rows_need_not_be_contiguous(kernels: Kernels) -> None:
    x = random_logits(4, 300)
    assert torch.equal(kernels.argmax(x[:, 7:150]), kernels.argmax(x[:, 7:150].contiguous()))
    assert torch.equal(
        kernels.top(x[::2, :99], torch.ones(2), 5)[1], kernels.top(x[::2, :99].clone(), torch.ones(2), 5)[1]
    )


CUTS = [None, (0, 0.9, 0.0), (3, 1.0, 0.0), (20, 0.7, 0.02)]


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from(WIDTHS[:-1]),
    cut=st.sampled_from(CUTS),
    temperature=st.sampled_from([0.4, 1.0, 2.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_chosen_ids_are_those_of_float64(
    kernels: Kernels,
    width: int,
    cut: tuple[int, float, float] | None,
    temperature: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """With a uniform number, with a key, and greedily; up to 1e-5, within which a border or tie may be decided differently."""
    x = random_logits(3, width, seed=seed).to(dtype)
    uniform = torch.rand(1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()
    (key,) = stream_keys(seed, 1, 2, 1)
    specs = [DrawSpec(temperature, cut, uniforms=[uniform]), DrawSpec(temperature, cut, keys=[key]), DrawSpec()]
    drawn, heard, greedy = kernels.choose(x, specs)
    assert greedy == first_largest(x)[2]
    if cut is not None and dtype == torch.bfloat16:
        return  # the reference does not decide which of equal logits at the border are kept
    top_k, top_p, min_p = cut or (0, 1.0, 0.0)
    laws = [dense_law(row.double(), temperature, top_k, top_p, min_p) for row in x]
    order = x[0].double().argsort(descending=True, stable=True) if cut else torch.arange(width)
    reached = laws[0][order].cumsum(0)
    place = int((order == drawn).nonzero()[0, 0])
    assert reached[place] - laws[0][drawn] - 1e-5 <= uniform <= reached[place] + 1e-5
    noise = exponentials([key], torch.arange(width))[0]
    kept = (laws[1] >= laws[1][heard].clamp(max=laws[1][laws[1] > 0].min())) if cut else torch.ones(width).bool()
    assert laws[1][heard] / noise[heard] >= (laws[1] / noise)[kept].max() * (1 - 1e-5) or laws[1][heard] <= 1e-5


@pytest.mark.parametrize("cut", CUTS)
def test_a_row_without_a_distribution_chooses_nothing(kernels: Kernels, cut: tuple[int, float, float] | None) -> None:
    x = random_logits(4, 90)
    x[0], x[1, 88], x[2, 0] = -torch.inf, torch.nan, torch.inf
    assert kernels.choose(x, [DrawSpec(1.0, cut, uniforms=[0.5])] * 4)[:3] == [-1, -1, -1]
    assert kernels.choose(x, [DrawSpec(1.0, cut, keys=[7])] * 4)[:3] == [-1, -1, -1]
    assert kernels.choose(x, [DrawSpec()] * 4) == [0, -1, 0, first_largest(x[3:])[0]]


def test_ids_of_probability_zero_are_never_chosen(kernels: Kernels) -> None:
    x = random_logits(1, 600).expand(2000, -1).clone()
    x[:, [0, 255, 256, 511, 599]] = -torch.inf
    x[:, 1::2] = -torch.inf
    uniforms = [0.0, 1 - 2**-53, *torch.rand(1998, dtype=torch.float64).tolist()]
    ids = kernels.choose(x, [DrawSpec(9.0, uniforms=[uniform]) for uniform in uniforms])
    assert not x[0, ids].isneginf().any()
    ids = kernels.choose(x, [DrawSpec(9.0, keys=[key]) for key in stream_keys(1, 0, 0, 2000)])
    assert not x[0, ids].isneginf().any()


def test_no_rows_have_no_truncated_distributions(kernels: Kernels) -> None:
    probs, ids = kernels.token_probs(torch.empty(0, 100), [], (5, 1.0, 0.0))
    assert len(probs) == len(ids) == 0
