"""EAGLE-3 as NeMo AutoModel writes it: SafeAILab's tensors with the prefix `model.`."""

from __future__ import annotations

from foredraft.heads.config import HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats import safeailab_eagle3
from foredraft.heads.formats.base import HeadFormat, renamed

_PREFIX = "model."


def matches(files: HeadFiles) -> bool:
    return f"{_PREFIX}fc.weight" in files.tensors and safeailab_eagle3.matches(_without_prefix(files))


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    return safeailab_eagle3.read(_without_prefix(files), target)


def _without_prefix(files: HeadFiles) -> HeadFiles:
    return renamed(files, (_PREFIX, ""))


FORMAT = HeadFormat("NeMo AutoModel", matches, read)
