"""Statistical tests of distributions. They return p-values."""

from __future__ import annotations

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""The probability that a statistical test fails although the distribution is right, per test and choice of seeds."""


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's test: the probability of counts at least as far from the expected ones as these. Cells that expect fewer than 5 are
    pooled; a count where none is expected gives 0."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    small = expected < 5
    cells = torch.cat([counts[~small], counts[small].sum()[None]])
    wanted = torch.cat([expected[~small], expected[small].sum()[None]])
    cells, wanted = cells[wanted > 0], wanted[wanted > 0]
    if len(cells) < 2:
        return 1.0
    statistic = ((cells - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def independence(a: Tensor, b: Tensor, size: int) -> float:
    """The chi-squared test of independence for two columns of ids below `size`: the probability of counts at least as far from
    independence as these."""
    table = torch.bincount(a * size + b, minlength=size * size).reshape(size, size).double()
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    statistic = ((table - expected) ** 2 / expected)[expected > 0].sum()
    degrees = (int((table.sum(1) > 0).sum()) - 1) * (int((table.sum(0) > 0).sum()) - 1)
    return float(torch.special.gammaincc(torch.tensor(degrees / 2, dtype=torch.float64), statistic / 2))
