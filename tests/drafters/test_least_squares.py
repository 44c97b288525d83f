"""Recursive least squares, compared with the normal equations, and the effect of its drift."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from foredraft.drafters._least_squares import RecursiveLeastSquares

INPUTS, OUTPUTS, BLOCK = 12, 5, 8


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def examples(count: int, seed: int, num_outputs: int = OUTPUTS) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, outputs, the weights that map one to the other)"""
    inputs = normalize(torch.randn(count, INPUTS, generator=generator(seed)))
    weight = torch.randn(num_outputs, INPUTS, generator=generator(seed + 1000))
    return inputs, inputs @ weight.T, weight


def learn(model: RecursiveLeastSquares, inputs: Tensor, outputs: Tensor) -> None:
    for x, y in zip(inputs.split(BLOCK), outputs.split(BLOCK), strict=True):
        model.learn(x, y - model(x))


def test_without_drift_it_solves_the_normal_equations() -> None:
    inputs, outputs, _ = examples(200, 1)
    outputs = outputs + torch.randn(outputs.shape, generator=generator(3))
    model = RecursiveLeastSquares(INPUTS, OUTPUTS, prior_variance=3.0, drift=0.0)
    learn(model, inputs, outputs)
    x, y = inputs.double(), outputs.double()
    wanted = torch.linalg.solve(x.T @ x + torch.eye(INPUTS).double() / 3.0, x.T @ y).T
    assert torch.allclose(model.weight.double(), wanted, atol=1e-4)


def test_with_drift_it_follows_a_change() -> None:
    def distance(drift: float) -> float:
        model = RecursiveLeastSquares(INPUTS, OUTPUTS, drift=drift)
        learn(model, *examples(4000, 1)[:2])
        inputs, outputs, weight = examples(200, 2)
        learn(model, inputs, outputs)
        return float((model.weight - weight).norm() / weight.norm())

    assert distance(0.03) < 0.2 < 0.8 < distance(0.0)


def test_the_covariance_stays_between_zero_and_the_prior() -> None:
    """Also in directions that no example has, where plain forgetting would let it grow without bound."""
    inputs, outputs, _ = examples(20_000, 1)
    inputs[:, INPUTS // 2 :] = 0
    model = RecursiveLeastSquares(INPUTS, OUTPUTS, prior_variance=3.0, drift=0.03)
    learn(model, inputs, outputs)
    eigenvalues = torch.linalg.eigvalsh(model._covariance.double())
    assert 0 < eigenvalues.min() < 0.5
    assert 2.9 < eigenvalues.max() < 3.001
    assert torch.equal(model._covariance, model._covariance.T)


def test_blocks_with_numbers_that_are_not_finite_are_ignored() -> None:
    inputs, outputs, _ = examples(BLOCK, 1)
    model = RecursiveLeastSquares(INPUTS, OUTPUTS)
    learn(model, inputs, outputs)
    before = model.weight.clone()
    for bad in (torch.nan, torch.inf):
        model.learn(inputs, torch.full_like(outputs, bad))
        model.learn(inputs * bad, outputs)
    assert torch.equal(model.weight, before)
