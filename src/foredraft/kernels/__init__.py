"""Compiled kernels for the processor at hand: built once with the system's C++ compiler, kept on disk, tested at start.

Where there is no compiler, or the processor lacks what they need, `load_kernels` gives None and PyTorch's own kernels run.
"""

from foredraft.kernels.decoder import AttentionShape, CacheSpan, Stack, StackBatch, StackLayer
from foredraft.kernels.native import Kernels
from foredraft.kernels.sources import InMemory, Interleaved, Joined, WeightSource, blocks_of, read_all
from foredraft.kernels.specs import RULES, DrawSpec, VerificationBatch, VerificationResult
from foredraft.kernels.start import is_int8_exact, linear_int8, load_kernels, why_none
from foredraft.kernels.weights import (
    PackedMatrix,
    QuantizedWeight,
    Weight,
    WeightFormat,
    check_channelwise_int8,
    dequantized,
    quantize_int8,
    unquantized,
)

__all__ = [
    "RULES",
    "AttentionShape",
    "CacheSpan",
    "DrawSpec",
    "InMemory",
    "Interleaved",
    "Joined",
    "Kernels",
    "PackedMatrix",
    "QuantizedWeight",
    "Stack",
    "StackBatch",
    "StackLayer",
    "VerificationBatch",
    "VerificationResult",
    "Weight",
    "WeightFormat",
    "WeightSource",
    "blocks_of",
    "check_channelwise_int8",
    "dequantized",
    "is_int8_exact",
    "linear_int8",
    "load_kernels",
    "quantize_int8",
    "read_all",
    "unquantized",
    "why_none",
]
