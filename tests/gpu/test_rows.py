"""The choice of tokens on the device, compared with PyTorch's."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foredraft.gpu import Inputs, rows
from foredraft.gpu.buckets import Bucket
from foredraft.kernels import CacheSpan, DrawSpec, StackBatch
from foredraft.sampling import choose_with, sampler

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = (1, 2, 100, 8192, 8193, 20_000)


def expected_of(x: Tensor) -> Tensor:
    ids, gaps = [], []
    for row in x.double().cpu():
        has_nan = bool(row.isnan().any())
        ids.append(-1 if has_nan else int((row == row.max()).nonzero()[0, 0]))
        largest = row.sort(descending=True).values
        gaps.append(float(largest[0] - largest[1]) if len(row) > 1 else torch.inf)
    return torch.tensor([ids, gaps], dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_top_two(dtype: torch.dtype, width: int, device: torch.device) -> None:
    x = torch.randn(3, width + 2, generator=torch.Generator().manual_seed(0)).to(device, dtype)[:, :width]
    assert torch.equal(rows.top_two(x).cpu(), expected_of(x))


@pytest.mark.parametrize("places", [(0, 1), (3, 8191), (5, 8192), (8192, 9999)])
def test_the_first_of_equal_numbers_is_chosen(places: tuple[int, int], device: torch.device) -> None:
    x = torch.zeros(1, 10_000, device=device)
    x[0, list(places)] = 2.0
    assert rows.top_two(x).cpu().tolist() == [[places[0]], [0.0]]


@pytest.mark.parametrize("place", [0, 8191, 8192, 9999])
def test_a_row_with_a_nan_has_no_token(place: int, device: torch.device) -> None:
    x = torch.zeros(2, 10_000, device=device)
    x[1, place] = torch.nan
    assert rows.top_two(x)[0].cpu().tolist() == [0, -1]


def test_all_but_one_number_may_be_masked(device: torch.device) -> None:
    x = torch.full((1, 9000), -torch.inf, device=device)
    x[0, 8500] = -3.0
    assert rows.top_two(x).cpu().tolist() == [[8500], [torch.inf]]


def test_ids_are_integers_beside_rows_that_are_drawn(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU greedy rows are chosen by the kernel and others by PyTorch; a draft has ids of both."""
    monkeypatch.setattr(sampler, "top_two_on_device", rows.top_two)
    logits = torch.zeros(2, 100, device=device)
    logits[0, 7], logits[1, 9] = 50.0, 50.0
    ids, _ = choose_with([DrawSpec(), DrawSpec(1.0, uniforms=[0.5])], 0, logits)
    assert ids == [7, 9]
    assert all(isinstance(number, int) for number in ids)


def test_a_generated_token_is_the_input_of_the_next_pass(device: torch.device) -> None:
    inputs, step = (Inputs(bucket, 2, device) for bucket in (Bucket(4, 2, 2, depth=3), Bucket(2, 2, 2)))
    spans = [CacheSpan(0, 3, 5, 16, array("q", [1, 2, 3, 4]))]
    inputs.fill(StackBatch([7, 8, 9], [5, 6, 7], None, [2], spans))
    inputs.send()
    rows.begin(inputs, step)
    assert step.row_spans.tolist() == [0, -1]
    assert step.capacities.tolist() == [16, 0]
    assert step.stores[:, 0].tolist() == [[1, 2], [3, 4]]
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    for chosen, position in ((11, 8), (12, 9)):
        rows.advance(torch.tensor([chosen, -1], dtype=torch.float64, device=device), ids, step)
        assert ids.tolist() == [chosen, -1]
        assert step.ids.tolist() == [chosen, 0]
        assert step.positions[0] == position
