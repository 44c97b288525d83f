"""Linear least squares over a stream of examples, in which older ones lose weight."""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR_VARIANCE = 3.0
DRIFT = 0.03


class RecursiveLeastSquares:
    """Recursive least squares as a Kalman filter over the weights (Kalman 1960), for inputs of norm about 1. The weights start at 0.

    drift: how far each block of examples moves the weights' covariance back towards the initial one. So old examples lose weight,
    and the covariance stays between 0 and the initial one, even in directions that no example has.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        device: torch.device | None = None,
        *,
        prior_variance: float = PRIOR_VARIANCE,
        drift: float = DRIFT,
    ) -> None:
        self.weight = torch.zeros(num_outputs, num_inputs, device=device)
        self._covariance = prior_variance * torch.eye(num_inputs, device=device)
        self._prior_variance = prior_variance
        self._drift = drift

    def __call__(self, inputs: Tensor) -> Tensor:
        """[n, num_inputs] -> [n, num_outputs]"""
        return torch.nn.functional.linear(inputs, self.weight)

    def learn(self, inputs: Tensor, errors: Tensor) -> None:
        """Learn one block of examples. inputs: [n, num_inputs]; errors: [n, num_outputs], wanted minus current outputs. A block with
        a non-finite number is skipped."""
        if not (inputs.sum() + errors.sum()).isfinite():
            return
        self._covariance.mul_(1 - self._drift).diagonal().add_(self._drift * self._prior_variance)
        spread = inputs @ self._covariance  # [n, num_inputs]
        innovation = torch.eye(len(inputs), device=inputs.device) + spread @ inputs.T
        root = torch.linalg.cholesky(innovation)
        half_gain = torch.linalg.solve_triangular(root, spread, upper=False)
        gain = torch.linalg.solve_triangular(root.T, half_gain, upper=True)  # [n, num_inputs]
        self.weight.addmm_(errors.T, gain)
        # the update is the product of a matrix and its own transpose, so the covariance stays symmetric
        self._covariance.addmm_(half_gain.T, half_gain, alpha=-1)
