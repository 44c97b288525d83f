"""What a form of head checkpoints is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from foredraft.heads.config import HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles

KIND_KEY = "speculators_model_type"
"""In config.json: what a head in the form of speculators is."""


class HeadFormat(NamedTuple):
    """matches: whether files are of this form. read: the head they hold; raises ModelError, one line, for what it cannot be.
    method: that drafts with it. kinds: what config.json has as KIND_KEY in such files, of those forms that have it."""

    name: str
    matches: Callable[[HeadFiles], bool]
    read: Callable[[HeadFiles, TargetShape], HeadCheckpoint]
    method: str = "eagle"
    kinds: tuple[str, ...] = ()


def architectures(files: HeadFiles) -> tuple[str, ...]:
    """The class names in config.json."""
    names = files.config.get("architectures")
    return tuple(names) if isinstance(names, list) else ()


def renamed(files: HeadFiles, *prefixes: tuple[str, str]) -> HeadFiles:
    """The same files with the first prefix of a name that matches replaced."""
    tensors = {}
    for name, tensor in files.tensors.items():
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        tensors[new + name.removeprefix(old)] = tensor
    return HeadFiles(files.name, files.config, tensors)
