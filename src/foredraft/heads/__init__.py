"""Heads, which draft from the target's hidden states: their checkpoints in every published format, and their computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.heads.attaching import AnyHead, TargetEnds, attach_head, attach_mtp
    from foredraft.heads.calibration import TEXT
    from foredraft.heads.compiled import CompiledEagle
    from foredraft.heads.config import (
        Ambiguity,
        AnyHeadConfig,
        DFlashConfig,
        EagleConfig,
        ExitConfig,
        HeadCheckpoint,
        HeadConfig,
        MedusaConfig,
        MtpConfig,
        TargetShape,
    )
    from foredraft.heads.corrections import BlockReading, Correctable, Correction
    from foredraft.heads.detection import head_method_of
    from foredraft.heads.dflash import DFlashHead
    from foredraft.heads.eagle import EagleHead, HeadReading
    from foredraft.heads.early_exit import EarlyExit
    from foredraft.heads.loading import load_head
    from foredraft.heads.medusa import MedusaHead
    from foredraft.heads.mtp import MtpHead
    from foredraft.heads.options import HeadOptions

__all__ = [
    "TEXT",
    "Ambiguity",
    "AnyHead",
    "AnyHeadConfig",
    "BlockReading",
    "CompiledEagle",
    "Correctable",
    "Correction",
    "DFlashConfig",
    "DFlashHead",
    "EagleConfig",
    "EagleHead",
    "EarlyExit",
    "ExitConfig",
    "HeadCheckpoint",
    "HeadConfig",
    "HeadOptions",
    "HeadReading",
    "MedusaConfig",
    "MedusaHead",
    "MtpConfig",
    "MtpHead",
    "TargetEnds",
    "TargetShape",
    "attach_head",
    "attach_mtp",
    "head_method_of",
    "load_head",
]

__getattr__ = attributes(
    __name__,
    {
        "config": (
            "Ambiguity",
            "AnyHeadConfig",
            "DFlashConfig",
            "EagleConfig",
            "ExitConfig",
            "HeadCheckpoint",
            "HeadConfig",
            "MedusaConfig",
            "MtpConfig",
            "TargetShape",
        ),
        "attaching": ("AnyHead", "TargetEnds", "attach_head", "attach_mtp"),
        "calibration": ("TEXT",),
        "compiled": ("CompiledEagle",),
        "corrections": ("BlockReading", "Correctable", "Correction"),
        "dflash": ("DFlashHead",),
        "detection": ("head_method_of",),
        "eagle": ("EagleHead", "HeadReading"),
        "early_exit": ("EarlyExit",),
        "loading": ("load_head",),
        "medusa": ("MedusaHead",),
        "mtp": ("MtpHead",),
        "options": ("HeadOptions",),
    },
)
