"""Sampling: the parameters of a request, and how logits become probabilities and tokens.

Only this package knows temperature, top-p, penalties and masks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.sampling.constraint import Bits, Constraint, has_id, only_id, refused_ids
    from foredraft.sampling.devices import to_device
    from foredraft.sampling.noise import shared_scores
    from foredraft.sampling.params import AUTO, VERIFICATIONS, LogitsProcessor, SamplingParams
    from foredraft.sampling.pending import Pending
    from foredraft.sampling.rules import NO_CHECKPOINT_RULES, CheckpointRules, not_honoured
    from foredraft.sampling.sampler import (
        NO_FAILURES,
        NOT_A_DISTRIBUTION,
        AdjustedLogits,
        Choice,
        Failures,
        Row,
        Sampler,
        adjusted,
        checked_ids,
        choose,
        choose_with,
        draft_specs,
        draw_specs,
        pending_choice,
        pick,
        sampled_groups,
        select,
        token_probs_of,
    )
    from foredraft.sampling.siblings import top_choices
    from foredraft.sampling.spec import Noise, SamplingSpec
    from foredraft.sampling.structured import StructuredOutputs
    from foredraft.sampling.token_probs import TokenProbs, inverse_cdf, joined, tempered

__all__ = [
    "AUTO",
    "NOT_A_DISTRIBUTION",
    "NO_CHECKPOINT_RULES",
    "NO_FAILURES",
    "VERIFICATIONS",
    "AdjustedLogits",
    "Bits",
    "CheckpointRules",
    "Choice",
    "Constraint",
    "Failures",
    "LogitsProcessor",
    "Noise",
    "Pending",
    "Row",
    "Sampler",
    "SamplingParams",
    "SamplingSpec",
    "StructuredOutputs",
    "TokenProbs",
    "adjusted",
    "checked_ids",
    "choose",
    "choose_with",
    "draft_specs",
    "draw_specs",
    "has_id",
    "inverse_cdf",
    "joined",
    "not_honoured",
    "only_id",
    "pending_choice",
    "pick",
    "refused_ids",
    "sampled_groups",
    "select",
    "shared_scores",
    "tempered",
    "to_device",
    "token_probs_of",
    "top_choices",
]

__getattr__ = attributes(
    __name__,
    {
        "constraint": ("Bits", "Constraint", "has_id", "only_id", "refused_ids"),
        "token_probs": ("TokenProbs", "inverse_cdf", "joined", "tempered"),
        "noise": ("shared_scores",),
        "params": ("AUTO", "VERIFICATIONS", "LogitsProcessor", "SamplingParams"),
        "pending": ("Pending",),
        "rules": ("NO_CHECKPOINT_RULES", "CheckpointRules", "not_honoured"),
        "sampler": (
            "NO_FAILURES",
            "NOT_A_DISTRIBUTION",
            "AdjustedLogits",
            "Choice",
            "Failures",
            "Row",
            "Sampler",
            "adjusted",
            "choose",
            "choose_with",
            "token_probs_of",
            "pending_choice",
            "pick",
            "sampled_groups",
            "select",
            "checked_ids",
            "draft_specs",
            "draw_specs",
        ),
        "devices": ("to_device",),
        "spec": ("Noise", "SamplingSpec"),
        "structured": ("StructuredOutputs",),
        "siblings": ("top_choices",),
    },
)
