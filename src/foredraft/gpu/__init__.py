"""A decoder on one GPU: passes over static memory, in Triton and PyTorch's products, captured into CUDA graphs.

`kernels` and `passes` need Triton: call `why_not` before importing them.
"""

from foredraft.gpu.buckets import Bucket, Noise, bucket_for, drafting_buckets, verification_buckets
from foredraft.gpu.graphs import Graphs, Runner, at_once
from foredraft.gpu.inputs import Inputs, SlotPaths
from foredraft.gpu.outputs import Outputs
from foredraft.gpu.start import on, why_not
from foredraft.gpu.weights import DeviceLayer, DeviceStack, Linear, Shape

__all__ = [
    "Bucket",
    "DeviceLayer",
    "DeviceStack",
    "Graphs",
    "Inputs",
    "Linear",
    "Noise",
    "Outputs",
    "Runner",
    "Shape",
    "SlotPaths",
    "at_once",
    "bucket_for",
    "drafting_buckets",
    "on",
    "verification_buckets",
    "why_not",
]
