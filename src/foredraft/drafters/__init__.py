"""Drafters, one per file. A new one needs a new file, and its class in the table of `attributes` and in REGISTRY."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from foredraft.drafters._requirements import REQUIREMENTS, missing_for
from foredraft.errors import ForedraftError
from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.drafters.combined import CombinedDrafter
    from foredraft.drafters.context import DrafterContext
    from foredraft.drafters.dflash import DFlashDrafter
    from foredraft.drafters.draft_model import DraftModelDrafter
    from foredraft.drafters.eagle import EagleDrafter
    from foredraft.drafters.early_exit import EarlyExitDrafter
    from foredraft.drafters.hybrid import HybridDrafter
    from foredraft.drafters.medusa import MedusaDrafter
    from foredraft.drafters.merged import MergedDrafter
    from foredraft.drafters.mtp import LayeredMtpDrafter, MtpDrafter
    from foredraft.drafters.ngram import NgramDrafter
    from foredraft.drafters.none import NoDrafter
    from foredraft.drafters.pard import PardDrafter
    from foredraft.drafters.peagle import PEagleDrafter
    from foredraft.drafters.refit_schedule import CountedRefits, RefitSchedule, TimedRefits, refits_of
    from foredraft.drafters.remote import RemoteDrafter
    from foredraft.drafters.scripted import ScriptedDrafter
    from foredraft.drafters.slem import SlemDrafter
    from foredraft.drafters.suffix import SuffixDrafter
    from foredraft.engine.proposal import Drafter

__getattr__ = attributes(
    __name__,
    {
        "combined": ("CombinedDrafter",),
        "context": ("DrafterContext",),
        "dflash": ("DFlashDrafter",),
        "draft_model": ("DraftModelDrafter",),
        "eagle": ("EagleDrafter",),
        "early_exit": ("EarlyExitDrafter",),
        "hybrid": ("HybridDrafter",),
        "medusa": ("MedusaDrafter",),
        "merged": ("MergedDrafter",),
        "mtp": ("MtpDrafter", "LayeredMtpDrafter"),
        "ngram": ("NgramDrafter",),
        "none": ("NoDrafter",),
        "pard": ("PardDrafter",),
        "peagle": ("PEagleDrafter",),
        "refit_schedule": ("CountedRefits", "RefitSchedule", "TimedRefits", "refits_of"),
        "remote": ("RemoteDrafter",),
        "scripted": ("ScriptedDrafter",),
        "slem": ("SlemDrafter",),
        "suffix": ("SuffixDrafter",),
    },
)

REGISTRY: Mapping[str, Callable[[DrafterContext], Drafter]] = MappingProxyType(
    {
        "none": lambda context: __getattr__("NoDrafter")(),
        "ngram": lambda context: __getattr__("NgramDrafter")(),
        "suffix": lambda context: __getattr__("SuffixDrafter")(),
        "draft_model": lambda context: _DRAFT_MODELS[context.vocabulary_method](context),
        "dflash": lambda context: __getattr__("DFlashDrafter").build(context),
        "eagle": lambda context: __getattr__("EagleDrafter").build(context),
        "early_exit": lambda context: __getattr__("EarlyExitDrafter").build(context),
        "medusa": lambda context: __getattr__("MedusaDrafter").build(context),
        "mtp": lambda context: __getattr__("MtpDrafter").build(context),
        "pard": lambda context: __getattr__("PardDrafter").build(context),
        "peagle": lambda context: __getattr__("PEagleDrafter").build(context),
        "remote": lambda context: __getattr__("RemoteDrafter").build(context),
        "self-int8": lambda context: __getattr__("DraftModelDrafter").build(context),
        "self-int4": lambda context: __getattr__("DraftModelDrafter").build(context),
    }
)
"""Builders of drafters by name. Each imports its drafter only when called, so that listing the names does not import PyTorch."""

_DRAFT_MODELS: Mapping[str, Callable[[DrafterContext], Drafter]] = MappingProxyType(
    {
        "same": lambda context: __getattr__("DraftModelDrafter").build(context),
        "slem": lambda context: __getattr__("SlemDrafter")(
            __getattr__("DraftModelDrafter").build(context.in_draft_vocabulary()), context.vocabularies
        ),
        "tli": lambda context: __getattr__("DraftModelDrafter").build(context),
    }
)
"""Builders of drafters that use a draft model, by `DrafterContext.vocabulary_method`."""

SELF_DRAFTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"self-int8": {"quantization": "int8"}, "self-int4": {"quantization": "int4"}}
)
"""Methods whose draft model is the target itself, loaded a second time with these LoadOptions changed."""


def build(name: str, context: DrafterContext) -> Drafter:
    """Build the drafter of this name in REGISTRY. Raises ForedraftError for an unknown name."""
    factory = REGISTRY.get(name)
    if factory is None:
        raise ForedraftError(f"unknown drafter {name!r}: it must be one of {', '.join(sorted(REGISTRY))}")
    return factory(context)


__all__ = [
    "REGISTRY",
    "REQUIREMENTS",
    "SELF_DRAFTS",
    "CombinedDrafter",
    "CountedRefits",
    "DFlashDrafter",
    "DraftModelDrafter",
    "DrafterContext",
    "EagleDrafter",
    "EarlyExitDrafter",
    "HybridDrafter",
    "LayeredMtpDrafter",
    "MedusaDrafter",
    "MergedDrafter",
    "MtpDrafter",
    "NgramDrafter",
    "NoDrafter",
    "PEagleDrafter",
    "PardDrafter",
    "RefitSchedule",
    "RemoteDrafter",
    "ScriptedDrafter",
    "SlemDrafter",
    "SuffixDrafter",
    "TimedRefits",
    "build",
    "missing_for",
    "refits_of",
]
