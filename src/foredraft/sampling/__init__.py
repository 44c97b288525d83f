"""Sampling: what a request asks for, and how logits become probabilities and tokens.

The only place that knows temperature, top-p, penalties and masks.
"""

from foredraft.sampling.constraint import Bits, Constraint, has_id, only_id, refused_ids
from foredraft.sampling.laws import Laws, inverse_cdf, joined, tempered
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
    "Bits",
    "Choice",
    "Constraint",
    "Laws",
    "LogitsProcessor",
    "Row",
    "Sampler",
    "SamplingParams",
    "StructuredOutputs",
    "adjusted",
    "choose",
    "choose_by",
    "has_id",
    "inverse_cdf",
    "joined",
    "laws_of",
    "only_id",
    "pick",
    "refused_ids",
    "report_failed",
    "report_nan",
    "sampled_groups",
    "tempered",
    "uniforms_for",
    "ways_of",
]
