"""How the matrices of a head are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from foredraft.heads.config import AnyHeadConfig, EagleConfig
from foredraft.kernels import WeightFormat, quantize_int4, quantize_int8, unquantized

LARGE_HEAD = 8_000_000
"""Weights in the matrices of an EAGLE head, from which on a draft token takes as long as reading them from memory."""
FORMAT_NAMES: Mapping[WeightFormat, str] = {quantize_int8: "int8", quantize_int4: "int4"}
"""The formats that round, as users name them."""


class HeadFormat(NamedTuple):
    """small: of EAGLE heads with fewer than LARGE_HEAD weights and of all other heads. large: of the others."""

    small: WeightFormat
    large: WeightFormat

    @classmethod
    def same(cls, weight_format: WeightFormat) -> HeadFormat:
        return cls(weight_format, weight_format)

    def of(self, config: AnyHeadConfig, head: nn.Module) -> WeightFormat:
        """The format of one head. head: with its own matrices as linear layers."""
        linears = (module for module in head.modules() if isinstance(module, nn.Linear))
        is_large = isinstance(config, EagleConfig) and sum(linear.weight.numel() for linear in linears) >= LARGE_HEAD
        return self.large if is_large else self.small


NOT_ROUNDED = HeadFormat.same(unquantized)
ROUNDED = HeadFormat(quantize_int8, quantize_int4)
"""Four bits halve the time of a large head and hardly change what it drafts; a small one stays in the caches and loses acceptance."""
