"""Block search gives the results of PyTorch's own argmax and topk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.sampling.search import argmax_rows, top_rows


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 4),
    width=st.sampled_from([1, 5, 64, 4095, 4096, 4097, 4159, 5000, 20_000]),
    levels=st.sampled_from([2, 40, 10**9]),
)
def test_the_same_as_torch_with_and_without_ties(seed: int, num_rows: int, width: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, levels, (num_rows, width), generator=generator).float()
    largest = x.amax(-1, keepdim=True)
    first = (x == largest).float().argmax(-1)
    assert torch.equal(argmax_rows(x), first)
    for count in {1, min(width, 7), min(width, 100), width}:
        values, ids = top_rows(x, count)
        assert torch.equal(values, x.topk(count, -1).values)
        assert torch.equal(x.gather(1, ids), values)
        # of equal values the first
        assert torch.equal(ids, x.sort(dim=-1, descending=True, stable=True).indices[:, :count])
        assert torch.equal(top_rows(x.double(), count)[1], ids)


def test_zeros_of_both_signs_are_equal_and_any_nan_comes_first() -> None:
    x = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.5, -torch.inf, torch.inf]])
    assert top_rows(x, 7)[1].tolist() == [[6, 4, 1, 2, 3, 0, 5]]
    negative_nan = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32)
    assert negative_nan.isnan().all()
    x[0, 3] = negative_nan
    assert top_rows(x, 2)[1].tolist() == [[3, 6]]


@pytest.mark.parametrize("place", [0, 63, 64, 4999])
def test_nan_is_found_wherever_it_is(place: int) -> None:
    x = torch.randn(3, 5000)
    x[1, place] = torch.nan
    assert argmax_rows(x)[1] == place
    assert top_rows(x, 3)[0][1, 0].isnan()
