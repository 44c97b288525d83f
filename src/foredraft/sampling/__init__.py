"""Sampling: what a request asks for, and how logits become probabilities and tokens.

The only place that knows temperature, top-p, penalties and masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.sampling.constraint import Bits, Constraint, has_id, only_id, refused_ids
    from foredraft.sampling.laws import Laws, inverse_cdf, joined, tempered
    from foredraft.sampling.noise import shared_scores
    from foredraft.sampling.params import AUTO, VERIFICATIONS, LogitsProcessor, SamplingParams
    from foredraft.sampling.sampler import (
        Choice,
        Chosen,
        Row,
        Sampler,
        adjusted,
        choose,
        choose_by,
        chosen_of,
        laws_of,
        pick,
        report_failed,
        sampled_groups,
        select,
        settled,
        uniforms_for,
        ways_of,
    )
    from foredraft.sampling.sending import sent
    from foredraft.sampling.structured import StructuredOutputs

__all__ = [
    "AUTO",
    "VERIFICATIONS",
    "Bits",
    "Choice",
    "Chosen",
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
    "chosen_of",
    "has_id",
    "inverse_cdf",
    "joined",
    "laws_of",
    "only_id",
    "pick",
    "refused_ids",
    "report_failed",
    "sampled_groups",
    "select",
    "sent",
    "settled",
    "shared_scores",
    "tempered",
    "uniforms_for",
    "ways_of",
]

__getattr__ = attributes(
    __name__,
    {
        "constraint": ("Bits", "Constraint", "has_id", "only_id", "refused_ids"),
        "laws": ("Laws", "inverse_cdf", "joined", "tempered"),
        "noise": ("shared_scores",),
        "params": ("AUTO", "VERIFICATIONS", "LogitsProcessor", "SamplingParams"),
        "sampler": (
            "Choice",
            "Chosen",
            "Row",
            "Sampler",
            "adjusted",
            "choose",
            "choose_by",
            "chosen_of",
            "laws_of",
            "pick",
            "report_failed",
            "sampled_groups",
            "select",
            "settled",
            "uniforms_for",
            "ways_of",
        ),
        "sending": ("sent",),
        "structured": ("StructuredOutputs",),
    },
)
