"""The losses compared with their definitions, and their gradients with automatic differentiation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.kernels import load_kernels
from foredraft.train import losses
from foredraft.train.losses import DistillationLoss, LossSums, TargetDistribution, distillation_loss, next_token_loss


def logits(seed: int, rows: int = 5, vocab: int = 7) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distilled(ours: torch.Tensor, theirs: torch.Tensor, temperature: float, kl_share: float) -> LossSums:
    return distillation_loss(ours, TargetDistribution.of(theirs, temperature), kl_share)


def by_definition(ours: torch.Tensor, theirs: torch.Tensor, temperature: float, kl_share: float) -> torch.Tensor:
    p, q = torch.softmax(theirs / temperature, -1), torch.softmax(ours / temperature, -1)
    tv = 0.5 * (p - q).abs().sum(-1)
    kl = (p * (p / q).log()).sum(-1)
    return (kl_share * kl + (1 - kl_share) * tv).sum()


@given(st.integers(0, 50), st.sampled_from([0.25, 0.8, 1.0, 2.0]), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_distillation_loss_and_its_gradient_follow_the_definition(
    seed: int, temperature: float, kl_share: float
) -> None:
    ours, theirs = logits(2 * seed).requires_grad_(), logits(2 * seed + 1)
    found = distilled(ours, theirs, temperature, kl_share)
    wanted = by_definition(ours, theirs, temperature, kl_share)
    assert float(found.loss) == pytest.approx(float(wanted), rel=1e-5)
    (gradient,) = torch.autograd.grad(found.loss, ours)
    (expected,) = torch.autograd.grad(wanted, ours)
    assert torch.allclose(gradient, expected, atol=1e-9)


@given(st.integers(0, 50))
def test_total_variation_is_one_minus_acceptance(seed: int) -> None:
    found = distilled(logits(seed), logits(seed + 100), 0.8, 0.0)
    assert float(found.loss) == pytest.approx(found.num_rows - found.acceptance, rel=1e-6)


def test_a_gradient_step_increases_acceptance() -> None:
    ours, theirs = logits(1).requires_grad_(), logits(2)
    before = distilled(ours, theirs, 1.0, 0.0)
    (gradient,) = torch.autograd.grad(before.loss, ours)
    after = distilled((ours - 0.1 * gradient).detach(), theirs, 1.0, 0.0)
    assert after.acceptance > before.acceptance


def test_a_student_equal_to_its_target_has_no_gradient() -> None:
    same = logits(3).requires_grad_()
    found = distilled(same, same.detach(), 0.7, 0.5)
    assert float(found.loss) == pytest.approx(0.0, abs=1e-6)
    assert found.agreement == found.num_rows
    (gradient,) = torch.autograd.grad(found.loss, same)
    assert float(gradient.abs().max()) == pytest.approx(0.0, abs=1e-9)


def test_next_token_is_cross_entropy() -> None:
    ours, next_ids = logits(4).requires_grad_(), torch.tensor([0, 6, 2, 2, 5])
    found = next_token_loss(ours, next_ids)
    wanted = torch.nn.functional.cross_entropy(ours, next_ids, reduction="sum")
    assert float(found.loss) == pytest.approx(float(wanted), rel=1e-5)
    (gradient,), (expected,) = (torch.autograd.grad(loss, ours) for loss in (found.loss, wanted))
    assert torch.allclose(gradient, expected, atol=1e-9)


def test_the_loss_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = logits(5, rows=11), logits(6, rows=11)
    whole = distilled(ours, theirs, 1.0, 0.4)
    monkeypatch.setattr(losses, "_CHUNK", 14)
    parts = distilled(ours, theirs, 1.0, 0.4)
    assert float(parts.loss) == pytest.approx(float(whole.loss))
    assert parts.acceptance == pytest.approx(whole.acceptance)


@pytest.mark.parametrize("chunk", [14, 1 << 18])
def test_selected_rows_are_compared_with_the_given_rows(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Some rows twice, some not at all, in any order; selections can be composed."""
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    theirs, places = logits(9, rows=6), torch.tensor([5, 0, 0, 3, 2])
    ours = logits(10).requires_grad_()
    whole = TargetDistribution.of(theirs, 0.8)
    expected = distilled(ours, theirs[places], 0.8, 0.4)
    (gradient,) = torch.autograd.grad(expected.loss, ours)
    for target in (whole.select(places), whole.select(torch.arange(6).flip(0)).select(5 - places)):
        found = distillation_loss(ours, target, 0.4)
        assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
        assert (found.acceptance, found.agreement) == pytest.approx((expected.acceptance, expected.agreement))
        (same,) = torch.autograd.grad(found.loss, ours)
        assert torch.allclose(same, gradient, atol=1e-12)


def test_rows_beyond_the_targets_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CHUNK", 14)
    ours, theirs = logits(11, rows=8).requires_grad_(), logits(12)
    found, alone = distilled(ours, theirs, 0.8, 0.4), distilled(ours[:5], theirs, 0.8, 0.4)
    assert float(found.loss) == pytest.approx(float(alone.loss))
    assert (found.acceptance, found.agreement, found.num_rows) == (alone.acceptance, alone.agreement, 5)
    (gradient,), (expected,) = (torch.autograd.grad(each.loss, ours) for each in (found, alone))
    assert torch.equal(gradient, expected)
    assert not gradient[5:].any()


def test_logits_in_bfloat16_get_a_gradient_in_bfloat16() -> None:
    ours: Any = logits(7).bfloat16().requires_grad_()
    found = distilled(ours, logits(8).bfloat16(), 1.0, 0.5)
    found.loss.backward()
    assert ours.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("progress", [0.0, 0.2, 1.0])
def test_compiled_kernels_give_the_same_loss_and_gradient(dtype: torch.dtype, progress: float) -> None:
    """With rows that are compared twice, and rows that do not count."""
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    theirs, ours = logits(13, rows=6, vocab=300).to(dtype), logits(14, rows=8, vocab=300).to(dtype).requires_grad_()
    places = torch.tensor([5, 0, 0, 3, 2])
    found, expected = [], []
    for loss, results in ((DistillationLoss(kernels=kernels), found), (DistillationLoss(), expected)):
        sums = loss(ours, loss.distribution(theirs).select(places), progress)
        (gradient,) = torch.autograd.grad(2 * sums.loss, ours)
        results += [sums.loss.detach(), torch.tensor(sums.acceptance), torch.tensor(sums.agreement), gradient]
    for ours_, theirs_ in zip(found, expected, strict=True):
        assert torch.allclose(
            ours_.double(), theirs_.double(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )
    assert not found[3][5:].any()


def test_the_kernels_are_used_for_float32_and_bfloat16_on_a_cpu_only() -> None:
    """There is no kernel for float64."""
    ours, theirs = logits(15), logits(16)
    loss, plain = DistillationLoss(kernels=load_kernels()), DistillationLoss()
    assert float(loss(ours, loss.distribution(theirs), 0.2).loss) == float(
        plain(ours, plain.distribution(theirs), 0.2).loss
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_rows_there_is_no_loss(dtype: torch.dtype) -> None:
    """A block may be too short to have a token this many positions after a predicted one."""
    loss = DistillationLoss(kernels=load_kernels())
    ours = torch.zeros(0, 7, dtype=dtype, requires_grad=True)
    sums = loss(ours, loss.distribution(logits(17).to(dtype)).select(torch.tensor([], dtype=torch.int64)), 0.2)
    sums.loss.backward()
    assert (float(sums.loss.detach()), sums.acceptance, sums.num_rows) == (0.0, 0.0, 0)
