"""The description of a format of head checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from foredraft.heads.config import HeadCheckpoint, TargetShape
from foredraft.heads.files import HeadFiles

KIND_KEY = "speculators_model_type"
"""The key in config.json that says the kind of a head in the format of speculators."""


class HeadFormat(NamedTuple):
    """matches: whether files are in this format. read: the head they hold; raises ModelError, one line, for invalid files. method:
    the method that drafts with it. kinds: possible values of KIND_KEY in config.json, for formats that have the key."""

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
    """The same files, with renamed tensors. prefixes: (old, new); in each name the first old prefix that matches is replaced."""
    tensors = {}
    for name, tensor in files.tensors.items():
        old, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        tensors[new + name.removeprefix(old)] = tensor
    return replace(files, tensors=tensors)
