"""Compiled kernels for the processor at hand: built once with the system's C++ compiler, kept on disk, tested at start.

Where there is no compiler, or the processor lacks what they need, `load_kernels` gives None and PyTorch's own kernels run.
"""

from foredraft.kernels.decoder import (
    CLAMPED_SWIGLU,
    GELU_TANH,
    LAYER_NORM,
    RMS_NORM,
    SILU,
    AttentionShape,
    CacheSpan,
    NormWeights,
    Stack,
    StackBatch,
    StackForm,
    StackLayer,
    StackMlp,
)
from foredraft.kernels.native import Kernels
from foredraft.kernels.sources import (
    InMemory,
    Interleaved,
    Joined,
    Reordered,
    RowSlice,
    WeightSource,
    blocks_of,
    read_all,
)
from foredraft.kernels.specs import RULES, DrawSpec, VerificationBatch, VerificationResult
from foredraft.kernels.start import is_int8_exact, linear_grouped, linear_int8, load_kernels, why_none
from foredraft.kernels.weights import (
    INT4_GROUP,
    PackedMatrix,
    QuantizedWeight,
    Weight,
    WeightFormat,
    check_channelwise_int8,
    dequantized,
    quantize_int4,
    quantize_int8,
    unquantized,
)

__all__ = [
    "CLAMPED_SWIGLU",
    "GELU_TANH",
    "INT4_GROUP",
    "LAYER_NORM",
    "RMS_NORM",
    "RULES",
    "SILU",
    "AttentionShape",
    "CacheSpan",
    "DrawSpec",
    "InMemory",
    "Interleaved",
    "Joined",
    "Kernels",
    "NormWeights",
    "PackedMatrix",
    "QuantizedWeight",
    "Reordered",
    "RowSlice",
    "Stack",
    "StackBatch",
    "StackForm",
    "StackLayer",
    "StackMlp",
    "VerificationBatch",
    "VerificationResult",
    "Weight",
    "WeightFormat",
    "WeightSource",
    "blocks_of",
    "check_channelwise_int8",
    "dequantized",
    "is_int8_exact",
    "linear_grouped",
    "linear_int8",
    "load_kernels",
    "quantize_int4",
    "quantize_int8",
    "read_all",
    "unquantized",
    "why_none",
]
