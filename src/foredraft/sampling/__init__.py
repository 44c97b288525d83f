"""Sampling: what a request asks for, and how logits become probabilities and tokens.

The only place that knows temperature, top-p, penalties and masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.sampling.constraint import Bits, Constraint, has_id, only_id, refused_ids
    from foredraft.sampling.devices import to_device
    from foredraft.sampling.noise import shared_scores
    from foredraft.sampling.params import AUTO, VERIFICATIONS, LogitsProcessor, SamplingParams
    from foredraft.sampling.sampler import (
        Choice,
        Chosen,
        Row,
        Sampler,
        adjusted,
        checked_ids,
        choose,
        choose_with,
        chosen_of,
        draw_specs,
        pick,
        report_failed,
        sampled_groups,
        select,
        token_probs_of,
        uniforms_for,
    )
    from foredraft.sampling.structured import StructuredOutputs
    from foredraft.sampling.token_probs import TokenProbs, inverse_cdf, joined, tempered

__all__ = [
    "AUTO",
    "VERIFICATIONS",
    "Bits",
    "Choice",
    "Chosen",
    "Constraint",
    "LogitsProcessor",
    "Row",
    "Sampler",
    "SamplingParams",
    "StructuredOutputs",
    "TokenProbs",
    "adjusted",
    "checked_ids",
    "choose",
    "choose_with",
    "chosen_of",
    "draw_specs",
    "has_id",
    "inverse_cdf",
    "joined",
    "only_id",
    "pick",
    "refused_ids",
    "report_failed",
    "sampled_groups",
    "select",
    "shared_scores",
    "tempered",
    "to_device",
    "token_probs_of",
    "uniforms_for",
]

__getattr__ = attributes(
    __name__,
    {
        "constraint": ("Bits", "Constraint", "has_id", "only_id", "refused_ids"),
        "token_probs": ("TokenProbs", "inverse_cdf", "joined", "tempered"),
        "noise": ("shared_scores",),
        "params": ("AUTO", "VERIFICATIONS", "LogitsProcessor", "SamplingParams"),
        "sampler": (
            "Choice",
            "Chosen",
            "Row",
            "Sampler",
            "adjusted",
            "choose",
            "choose_with",
            "chosen_of",
            "token_probs_of",
            "pick",
            "report_failed",
            "sampled_groups",
            "select",
            "checked_ids",
            "uniforms_for",
            "draw_specs",
        ),
        "devices": ("to_device",),
        "structured": ("StructuredOutputs",),
    },
)
