"""Sampling: what a request asks for, and how logits become probabilities and tokens.

The only place that knows temperature, top-p, penalties and masks.
"""

from foredraft.sampling.laws import Laws, inverse_cdf, joined
from foredraft.sampling.params import AUTO, VERIFICATIONS, LogitsProcessor, SamplingParams
from foredraft.sampling.sampler import (
    Choice,
    Row,
    Sampler,
    adjusted,
    choose,
    choose_by,
    laws_of,
    pick,
    report_failed,
    report_nan,
    sampled_groups,
    uniforms_for,
    ways_of,
)
from foredraft.sampling.structured import StructuredOutputs

__all__ = [
    "AUTO",
    "VERIFICATIONS",
    "Choice",
    "Laws",
    "LogitsProcessor",
    "Row",
    "Sampler",
    "SamplingParams",
    "StructuredOutputs",
    "adjusted",
    "choose",
    "choose_by",
    "inverse_cdf",
    "joined",
    "laws_of",
    "pick",
    "report_failed",
    "report_nan",
    "sampled_groups",
    "uniforms_for",
    "ways_of",
]
