"""How many rows to run, so that a row's bits do not depend on the other rows. Measured on PyTorch 2.13, oneDNN, AVX-512.
With AMX no padding helps: see probe.py.

Three things change with the number of rows, and padding avoids each:

* A single row is a matrix-vector product, which may use another kernel: never run fewer than two.
* A product of at most 4,096 multiplications runs in a kernel of PyTorch instead of oneDNN, with other sums. Only toy models
  have matrices so small that a few rows stay below that.
* In elementwise operations, the last numbers of a tensor that do not fill two vector registers go through scalar code. Over
  all bfloat16 inputs silu, sigmoid, tanh and exp give the same bits there; tanh-gelu differs for four of them. If
  widths are multiples of 64 (as nearly everywhere), there is no remainder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod

from torch import nn

SMALL_PRODUCT = 4096
_VECTOR = 64
_MOST = 16


@dataclass(frozen=True, slots=True)
class RowRule:
    """Run at least `least` rows, and a multiple of `multiple`."""

    least: int = 2
    multiple: int = 1

    def pad(self, num_rows: int) -> int:
        """The number of rows to run for this many."""
        return -(-max(num_rows, self.least) // self.multiple) * self.multiple


def rule_for(shapes: Iterable[tuple[int, ...]], *, exact_shapes: Iterable[tuple[int, ...]] = ()) -> RowRule:
    """The rule for PyTorch's products with matrices of these shapes, and for our own kernels' products, whose rows never see each other,
    with matrices of exact_shapes. At most 16 rows of padding, even for a model that needs more."""
    shapes, exact_shapes = list(shapes), list(exact_shapes)
    unit = gcd(_VECTOR, *(side for shape in [*shapes, *exact_shapes] for side in shape[-2:]))
    least = least_rows(min(prod(shape[-2:]) for shape in shapes)) if shapes else 1
    return RowRule(least, min(_MOST, _VECTOR // unit))


def least_rows(work: int) -> int:
    """How many rows a product needs to stay with oneDNN, if each row takes `work` multiplications."""
    return max(2, min(_MOST, SMALL_PRODUCT // max(work, 1) + 1))


def rule_of(model: nn.Module) -> RowRule:
    """The rule for all matrices of a model, including packed ones, except those that are only looked up."""
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    exact: list[tuple[int, ...]] = []
    shapes: list[tuple[int, ...]] = [
        tuple(p.shape) for p in model.parameters() if p.dim() in (2, 3) and id(p) not in looked_up
    ]
    for module in model.modules():
        if hasattr(module, "out_features") and hasattr(module, "in_features"):
            shape = (int(module.out_features), int(module.in_features))  # type: ignore[arg-type]
            (exact if getattr(module, "is_row_exact", False) else shapes).append(shape)
    return rule_for(shapes, exact_shapes=exact)
