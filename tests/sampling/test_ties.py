"""Equal logits at a border of truncation: the float64 reference, PyTorch's path and the compiled one keep the same ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels import load_kernels
from foredraft.sampling import search, token_probs
from foredraft.sampling.token_probs import truncated
from tests.laws import dense_law

ROUNDING = 4e-7
"""The rounding error of a sum over a few hundred probabilities in float32."""


def kept(logits: Tensor, temperature: float, keep: dict[str, Any], *, compiled: bool) -> list[int]:
    """The ids that truncation keeps in one row."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(token_probs, "kernels_for", lambda _: None)
            patch.setattr(search, "load_kernels", lambda: None)
        law = truncated(logits[None], torch.tensor([temperature]), **keep).dense(len(logits))[0]
    return (law > 0).nonzero()[:, 0].tolist()


def is_near_a_border(logits: Tensor, temperature: float, keep: dict[str, Any]) -> bool:
    """Whether some id is closer to a border in float64 than float32 can resolve."""
    whole = torch.softmax(logits.double() / temperature, dim=0)
    ratio = whole / whole.max()
    if bool(((ratio - keep["min_p"]).abs() < ROUNDING * ratio).any()) and keep["min_p"] not in (0.0, 1.0):
        return True
    law = dense_law(logits.double(), temperature, keep["top_k"], 1.0, keep["min_p"])
    reached = law.sort(descending=True).values.cumsum(0)
    return keep["top_p"] < 1 and bool(((reached - (1 - 1e-6) * keep["top_p"]).abs() < ROUNDING).any())


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    values=st.one_of(
        st.lists(st.integers(-3, 3), min_size=1, max_size=40),
        st.integers(1, 300).map(lambda n: [0] * n),
        st.builds(
            lambda low, high, n: [low] * n + [high] * 3 + [low] * n, st.just(-4), st.just(1), st.integers(1, 120)
        ),
        st.lists(st.sampled_from([0, 0, 0, 1, -8, -(10**9)]), min_size=60, max_size=300),
    ),
    step=st.sampled_from([1.0, 0.125, 0.3]),
    top_k=st.sampled_from([0, 1, 2, 3, 5, 17, 64, 65, 200]),
    top_p=st.sampled_from([1.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 0.75, 0.9, 0.95, 0.99]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    temperature=st.sampled_from([0.5, 0.7, 1.0, 2.0, 3.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example([0] * 10, 1.0, 0, 0.3, 0.0, 1.0, torch.float32)
@example([0] * 10, 1.0, 0, 0.7, 0.0, 1.0, torch.bfloat16)
@example([0] * 100, 1.0, 0, 0.6, 0.0, 1.0, torch.float32)
@example([1] + [0] * 99, 1.0, 2, 0.5, 0.0, 1.0, torch.bfloat16)
def test_every_implementation_keeps_the_same_ids(
    values: list[int], step: float, top_k: int, top_p: float, min_p: float, temperature: float, dtype: torch.dtype
) -> None:
    logits = (step * torch.tensor(values, dtype=torch.float32)).to(dtype)
    keep = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    assume(not is_near_a_border(logits, temperature, keep))
    law = dense_law(logits.double(), temperature, **keep)
    expected = (law > 0).nonzero()[:, 0].tolist()
    assert kept(logits.double(), temperature, keep, compiled=False) == expected
    for_each = [logits, logits.float()]
    assert [kept(row, temperature, keep, compiled=False) for row in for_each] == [expected] * 2
    if load_kernels() is not None:
        assert [kept(row, temperature, keep, compiled=True) for row in for_each] == [expected] * 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("width", [40, 5000])
def test_top_p_keeps_the_first_of_equal_logits_and_top_k_keeps_all(compiled: bool, width: int) -> None:
    if compiled and load_kernels() is None:
        pytest.skip("no compiled kernels here")
    logits = torch.full((width,), -30.0)
    logits[[7, 9, 33]] = torch.tensor([1.0, 2.0, 1.0])  # probabilities 0.58 for id 9, 0.21 for ids 7 and 33
    for dtype in (torch.float32, torch.bfloat16):
        row = logits.to(dtype)
        assert kept(row, 1.0, {"top_k": 0, "top_p": 0.7, "min_p": 0.0}, compiled=compiled) == [7, 9]
        assert kept(row, 1.0, {"top_k": 2, "top_p": 1.0, "min_p": 0.0}, compiled=compiled) == [7, 9, 33]
        assert kept(row, 1.0, {"top_k": 2, "top_p": 0.7, "min_p": 0.0}, compiled=compiled) == [7, 9]
        assert kept(row, 1.0, {"top_k": 0, "top_p": 1.0, "min_p": 0.3}, compiled=compiled) == [7, 9, 33]


@pytest.mark.parametrize("compiled", [True, False])
def test_different_logits_are_no_tie_even_if_their_probabilities_are_equal(compiled: bool) -> None:
    if compiled and load_kernels() is None:
        pytest.skip("no compiled kernels here")
    logits = torch.tensor([2e-9, 1e-9, 3e-9, -1.0])
    assert kept(logits, 1.0, {"top_k": 2, "top_p": 1.0, "min_p": 0.0}, compiled=compiled) == [0, 2]


@pytest.mark.parametrize("compiled", [True, False])
def test_masked_ids_are_never_kept(compiled: bool) -> None:
    if compiled and load_kernels() is None:
        pytest.skip("no compiled kernels here")
    logits = torch.full((3000,), -torch.inf)
    logits[[5, 2999]] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(token_probs, "kernels_for", lambda _: None)
        law = truncated(logits[None], torch.ones(1), top_k=50, top_p=1.0, min_p=0.0)
    assert law.ids is not None
    assert law.ids.tolist() == [[5, 2999]]


def test_other_rows_of_the_batch_change_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-4, 4, (7, 5000), generator=generator).float()
    keep = {"top_k": 0, "top_p": 0.4, "min_p": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_probs, "kernels_for", lambda _: None)
        together = truncated(logits, torch.ones(7), **keep).dense(5000)
        for r in range(7):
            assert torch.equal(truncated(logits[r : r + 1], torch.ones(1), **keep).dense(5000)[0], together[r])
