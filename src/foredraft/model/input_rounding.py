"""Measure how far rounding the inputs of a model's linear layers to eight bits moves its logits.

Kernels for quantized weights round the inputs in every layer, so their results differ from the library's floating-point forward, and the
more so the deeper a model is and the more outliers its activations have. Only the model itself can show by how much, so the library's own
forward is run with rounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from foredraft.kernels import QuantizedWeight
from foredraft.model.stored import StoredLinear, is_linear

GroupOf = Callable[[Any], int | None]
"""A linear layer -> how many of its inputs share a scale when they are rounded; None if they are not."""

_LARGEST_INT8 = 127


def never(linear: Any) -> int | None:
    """For bodies that multiply in floating point."""
    return None


def where_stored(linear: Any) -> int | None:
    """For bodies that multiply quantized weights as they are stored: the weight's group size."""
    if not isinstance(linear, StoredLinear):
        return None
    row = linear.source.rows(0, 1)
    return row.group if isinstance(row, QuantizedWeight) else None


def everywhere(linear: Any) -> int | None:
    """For bodies that round the other weights to int8 too: one scale per row."""
    group = where_stored(linear)
    return (
        int(linear.in_features if isinstance(linear, nn.Linear) else linear.weight.shape[0]) if group is None else group
    )


@contextmanager
def rounded_inputs(hf: nn.Module, group_of: GroupOf, sequence: int) -> Iterator[bool]:
    """While this is active, linear layers round their inputs for one sequence of a batch. Yields whether any of them does."""
    handles = []
    for module in hf.modules():
        group = group_of(module) if is_linear(module) else None
        if group is not None:
            handles.append(module.register_forward_pre_hook(_rounding(group, sequence)))
    try:
        yield bool(handles)
    finally:
        for handle in handles:
            handle.remove()


def _rounding(group: int, sequence: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0]
        if x.dim() < 3:
            return None  # no batch dimension
        x = x.clone()
        x[sequence] = rounded(x[sequence], group)
        return (x, *args[1:])

    return hook


def rounded(x: Tensor, group: int) -> Tensor:
    """Round each group of inputs to 127 steps on either side of 0, up to its largest. x: [..., k]"""
    groups = x.float().contiguous().view(*x.shape[:-1], -1, group)
    step = groups.abs().amax(-1, keepdim=True) / _LARGEST_INT8
    numbers: Tensor = (groups / step.clamp(min=1e-30)).round() * step
    return numbers.view(x.shape).to(x.dtype)
