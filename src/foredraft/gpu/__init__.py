"""A decoder on one GPU: its passes over static memory, in Triton and the library's products, captured into CUDA graphs.

Whoever has no Triton has no `kernels` and no `passes`; ask `has_triton` before importing them.
"""

from importlib.util import find_spec

from foredraft.gpu.buckets import Bucket, bucket_for, drafting_buckets, verification_buckets
from foredraft.gpu.graphs import Graphs, Runner, at_once
from foredraft.gpu.inputs import Inputs, SpanPlace
from foredraft.gpu.weights import DeviceLayer, DeviceStack, Linear, Shape

__all__ = [
    "Bucket",
    "DeviceLayer",
    "DeviceStack",
    "Graphs",
    "Inputs",
    "Linear",
    "Runner",
    "Shape",
    "SpanPlace",
    "at_once",
    "bucket_for",
    "drafting_buckets",
    "has_triton",
    "verification_buckets",
]


def has_triton() -> bool:
    """PyTorch for CUDA brings it."""
    return find_spec("triton") is not None
