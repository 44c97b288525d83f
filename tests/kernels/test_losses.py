"""Softmax and divergences by the compiled kernels, compared with their definitions in float64 and with gradients by automatic
differentiation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.kernels import Kernels

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 15, 16, 17, 255, 256, 257, 4096, 5003]


def random_logits(num_rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(num_rows, width, generator=generator)).to(dtype)


def distilled(
    kernels: Kernels,
    logits: Tensor,
    theirs: Tensor,
    temperature: float,
    kl_share: float,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Call the kernel. -> the gradient and the sums"""
    gradient = torch.full_like(logits, torch.nan)
    target = kernels.softmax(theirs, temperature)
    return gradient, kernels.distill(logits, temperature, target, places, kl_share, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("temperature", [0.25, 0.8, 2.0])
def test_softmax_is_the_distribution_with_its_negative_entropy(
    kernels: Kernels, dtype: torch.dtype, width: int, temperature: float
) -> None:
    logits = random_logits(5, width, dtype)
    probs, negative_entropy, likeliest = kernels.softmax(logits, temperature)
    expected = torch.softmax(logits.double() / temperature, -1)
    assert torch.allclose(probs.double(), expected, rtol=3e-5, atol=1e-12)
    assert torch.allclose(negative_entropy.double(), torch.special.xlogy(expected, expected).sum(-1), atol=2e-5)
    assert torch.equal(likeliest, logits.float().argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kl_share", [0.0, 0.3, 1.0])
def test_a_divergence_and_its_gradient_are_those_of_the_definition(
    kernels: Kernels, dtype: torch.dtype, width: int, kl_share: float
) -> None:
    logits, theirs = random_logits(5, width, dtype), random_logits(5, width, dtype, seed=1)
    gradient, sums = distilled(kernels, logits, theirs, 0.8, kl_share)
    exact = logits.double().requires_grad_()
    p, log_q = torch.softmax(theirs.double() / 0.8, -1), torch.log_softmax(exact / 0.8, -1)
    divergence = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    losses = kl_share * divergence + (1 - kl_share) * (1 - overlap)
    (expected,) = torch.autograd.grad(losses.sum(), exact)
    assert torch.allclose(sums[:, 0], losses.detach(), rtol=1e-5, atol=2e-6)
    assert torch.allclose(sums[:, 1], overlap.detach(), atol=2e-6)
    assert torch.equal(sums[:, 2], (logits.float().argmax(-1) == theirs.float().argmax(-1)).double())
    assert torch.allclose(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_each_row_is_compared_with_the_given_row_in_any_batch(kernels: Kernels, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    theirs, places = random_logits(6, 30_000, torch.bfloat16), torch.tensor([5, 0, 0, 3, 2])
    logits = random_logits(5, 30_000, torch.bfloat16, seed=1)
    gradient, sums = distilled(kernels, logits, theirs, 0.8, 0.4, places)
    for row, place in enumerate(places.tolist()):
        alone = distilled(kernels, logits[row : row + 1], theirs[place : place + 1], 0.8, 0.4)
        assert torch.equal(gradient[row : row + 1], alone[0])
        assert torch.equal(sums[row : row + 1], alone[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_student_equal_to_its_target_has_no_gradient(kernels: Kernels, dtype: torch.dtype) -> None:
    logits = random_logits(3, 500, dtype)
    gradient, sums = distilled(kernels, logits, logits, 0.7, 0.0)
    assert not gradient.any()
    assert torch.allclose(sums[:, 0], torch.zeros(3, dtype=torch.float64), atol=1e-6)


def test_masked_ids_have_no_probability_and_no_gradient(kernels: Kernels) -> None:
    logits, theirs = random_logits(2, 40, torch.float32), random_logits(2, 40, torch.float32, seed=1)
    logits[:, 5] = theirs[:, 5] = -torch.inf
    gradient, sums = distilled(kernels, logits, theirs, 0.8, 0.5)
    others = [place for place in range(40) if place != 5]
    without, same = distilled(kernels, logits[:, others], theirs[:, others], 0.8, 0.5)
    assert not gradient[:, 5].any()
    assert torch.allclose(gradient[:, others], without, atol=1e-6)
    assert torch.allclose(sums, same, atol=1e-6)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_a_loss_that_is_not_finite(kernels: Kernels, broken: float) -> None:
    logits, theirs = random_logits(2, 40, torch.bfloat16), random_logits(2, 40, torch.bfloat16, seed=1)
    logits[1, 7] = broken
    _, sums = distilled(kernels, logits, theirs, 0.8, 0.5)
    assert torch.isfinite(sums[0]).all()
    assert not torch.isfinite(sums[1, 0])


def test_inconsistent_shapes_are_refused(kernels: Kernels) -> None:
    logits, theirs = random_logits(2, 40, torch.float32), random_logits(3, 40, torch.float32)
    target = kernels.softmax(theirs, 1.0)
    with pytest.raises(ValueError, match="compared"):
        kernels.distill(logits, 1.0, target, None, 0.5, torch.empty(2, 40))
    with pytest.raises(ValueError, match="places"):
        kernels.distill(logits, 1.0, target, torch.tensor([0, 3]), 0.5, torch.empty(2, 40))
    with pytest.raises(ValueError, match="gradient"):
        kernels.distill(logits, 1.0, target, torch.tensor([0, 2]), 0.5, torch.empty(2, 40, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float64"):
        kernels.softmax(logits.double(), 1.0)
