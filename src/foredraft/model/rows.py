"""How many rows to run, so that a row's bits do not depend on the other rows. Measured on PyTorch 2.13, oneDNN, AVX-512.
With AMX no padding helps: see probe.py.

Three things change with the number of rows, and padding mends each:

* One row alone is a matrix by a vector, which may take another kernel: never run fewer than two.
* A product of at most 4,096 multiplications leaves oneDNN for a kernel of PyTorch's own, with other sums. Only toys have
  matrices so small that a few rows stay below that.
* Element by element, the last numbers of a tensor that do not fill two vector registers go through scalar code. Over
  all bfloat16 inputs silu, sigmoid, tanh and exp give the same bits there; tanh-gelu differs for four of them. Where
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
    """For PyTorch's products with matrices of these shapes, and for products of our own kernels with those of
    exact_shapes, whose rows never see each other. At most 16 rows of padding: a model that needs more goes without."""
    shapes, exact_shapes = list(shapes), list(exact_shapes)
    unit = gcd(_VECTOR, *(side for shape in [*shapes, *exact_shapes] for side in shape[-2:]))
    least = least_rows(min(prod(shape[-2:]) for shape in shapes)) if shapes else 1
    return RowRule(least, min(_MOST, _VECTOR // unit))


def least_rows(work: int) -> int:
    """Rows of `work` multiplications each that a product needs to stay with oneDNN."""
    return max(2, min(_MOST, SMALL_PRODUCT // max(work, 1) + 1))


def rule_of(model: nn.Module) -> RowRule:
    """For every matrix of a model, packed ones too, but those that are only looked up."""
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
