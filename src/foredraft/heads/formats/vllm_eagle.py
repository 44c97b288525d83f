"""vLLM's wrapper around an EAGLE head's configuration, with the configuration of the layers in `model`."""

from __future__ import annotations

from foredraft.errors import ModelError
from foredraft.heads.config import HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles
from foredraft.heads.formats import safeailab_eagle1, safeailab_eagle3
from foredraft.heads.formats.base import HeadFormat, renamed


def matches(files: HeadFiles) -> bool:
    return files.config.get("model_type") == "eagle"


def read(files: HeadFiles, target: TargetShape) -> HeadCheckpoint:
    files = renamed(_unwrapped(files), ("model.", ""))
    for form in (safeailab_eagle3.FORMAT, safeailab_eagle1.FORMAT):
        if form.matches(files):
            return form.read(files, target)
    raise ModelError("its weights are not an EAGLE head: they should include fc.weight and layers.0")


def _unwrapped(files: HeadFiles) -> HeadFiles:
    """The files with a flat configuration. As in vLLM, outer keys override those of the layers."""
    inner = files.config.get("model")
    if not isinstance(inner, dict):
        raise ModelError("config.json of type eagle must hold the layers' configuration in model")
    outer = {key: value for key, value in files.config.items() if key not in ("model", "model_type", "architectures")}
    return HeadFiles(files.name, {**inner, **outer}, files.tensors)


FORMAT = HeadFormat("vLLM's EAGLE", matches, read)
