"""The formats in which heads are published: one file per format, and one line in FORMATS."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.heads.formats import (
    deepspec,
    dflash,
    early_exit,
    medusa_legacy,
    medusa_vllm,
    nemo,
    projected_eagle1,
    safeailab_eagle1,
    safeailab_eagle3,
    speculators,
    vllm_eagle,
)
from foredraft.heads.formats.base import HeadFormat

FORMATS: Sequence[HeadFormat] = (
    early_exit.FORMAT,
    projected_eagle1.FORMAT,
    dflash.SPECULATORS,
    dflash.FORMAT,
    speculators.PARALLEL,
    speculators.FORMAT,
    medusa_vllm.FORMAT,
    medusa_legacy.FORMAT,
    vllm_eagle.FORMAT,
    deepspec.FORMAT,
    nemo.FORMAT,
    safeailab_eagle3.FORMAT,
    safeailab_eagle1.FORMAT,
)
"""The first format that matches the files is used."""
