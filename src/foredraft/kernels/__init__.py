"""Compiled kernels for the processor at hand: built once with the system's C++ compiler, kept on disk, tested at start.

Where there is no compiler, or the processor lacks what they need, `load_kernels` gives None and PyTorch's own kernels run.
"""

from foredraft.kernels.layout import (
    RULES,
    AttentionShape,
    DrawSpec,
    PackedMatrix,
    Stack,
    StackLayer,
    StackPass,
    StackSpan,
    VerificationBatch,
    VerificationResult,
    interleaved,
    quantised,
)
from foredraft.kernels.native import Kernels
from foredraft.kernels.start import is_int8_exact, linear_int8, load_kernels, why_none

__all__ = [
    "RULES",
    "AttentionShape",
    "DrawSpec",
    "Kernels",
    "PackedMatrix",
    "Stack",
    "StackLayer",
    "StackPass",
    "StackSpan",
    "VerificationBatch",
    "VerificationResult",
    "interleaved",
    "is_int8_exact",
    "linear_int8",
    "load_kernels",
    "quantised",
    "why_none",
]
