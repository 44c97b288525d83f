"""Heads for other engines: which form each engine loads, and how to write a head in that form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from foredraft.errors import ForedraftError
from foredraft.export.choice import Choice

if TYPE_CHECKING:
    from foredraft.heads import HeadCheckpoint

EAGLE_KINDS: Mapping[str, str] = MappingProxyType({"eagle1": "eagle", "eagle3": "eagle3"})
"""The engines' names for the kinds of EAGLE heads, in lower case."""

SaveHead: TypeAlias = Callable[["HeadCheckpoint", str, Path], None]
"""Called with the head, its target's name and a folder."""


class HeadForm(NamedTuple):
    """names: the forms that an engine loads, as heads/formats calls them. save: writes the first of them. check: raises ValueError for a
    head that it cannot hold."""

    names: Sequence[str]
    save: SaveHead
    check: Callable[[Any], None] = lambda config: None


def checkpoint_of(choice: Choice) -> HeadCheckpoint:
    """The head of a choice whose method needs one."""
    if choice.head is None:
        raise ForedraftError(f'method "{choice.method}" needs a head: give its directory or hub id as --draft-model')
    return choice.head


def eagle_kind(choice: Choice) -> str:
    """The kind of the choice's EAGLE head."""
    return str(checkpoint_of(choice).config.kind)


def check_form(choice: Choice, engine: str, form: HeadForm) -> None:
    """Raises ForedraftError for a head in a form that the engine does not load, naming the option that helps, if it does. No engine is
    known to load a quantised head."""
    head = checkpoint_of(choice)
    given = f"{head.form}, quantized" if head.is_quantized else head.form
    if given not in form.names:
        _check_can_be_written(choice, form)
        raise ForedraftError(
            f"{engine} loads heads in the format of {' or '.join(form.names)}, but {choice.draft} is in that of {given}: give "
            "--head-output DIR to write the head there in the engine's format"
        )


def written(choice: Choice, form: HeadForm, folder: Path) -> Choice:
    """Write the head in an engine's form to this folder -> the choice that names the folder. The choice keeps the head's known
    configuration, because the new files, read again, could be taken to mean other layers. Raises ForedraftError for a head that the
    form cannot hold, and for a folder that is not empty or cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise ForedraftError(f"{folder} is a file: give --head-output a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ForedraftError(f"{folder} is not empty: give another --head-output")
    head = checkpoint_of(choice)
    _check_can_be_written(choice, form)
    try:
        form.save(head, choice.target, folder)
    except OSError as error:
        raise ForedraftError(f"{folder} cannot be written ({error.strerror}): give another --head-output") from None
    return replace(choice, draft=str(folder.absolute()), head=replace(head, form=form.names[0], is_quantized=False))


def _check_can_be_written(choice: Choice, form: HeadForm) -> None:
    """Raises ForedraftError for a head that the form cannot hold."""
    head = checkpoint_of(choice)
    if head.borrows_rows:
        raise ForedraftError(
            f"{choice.draft} drafts part of the vocabulary with the target's lm_head, but other engines need an lm_head in the head: "
            "train it without --share-lm-head"
        )
    try:
        form.check(head.config)
    except ValueError as error:
        raise ForedraftError(f"{choice.draft} cannot be written as {form.names[0]}: {error}") from None


def check_speculators(config: Any) -> None:
    from foredraft.heads.saving import check_eagle3

    check_eagle3(config)


def check_safeailab(config: Any) -> None:
    from foredraft.heads.saving import check_safeailab_eagle3

    check_safeailab_eagle3(config)


def save_speculators(head: HeadCheckpoint, target: str, folder: Path) -> None:
    from foredraft.heads.eagle import EagleHead
    from foredraft.heads.saving import save_eagle3
    from foredraft.model.checkpoint import raw_config

    architectures = raw_config(target).get("architectures", [])
    save_eagle3(EagleHead.of(head, _no_target, _no_target), folder, target, architectures, _dtype(head))


def save_medusa_head(head: HeadCheckpoint, target: str, folder: Path) -> None:
    from foredraft.heads.medusa import MedusaHead
    from foredraft.heads.saving import save_medusa

    save_medusa(MedusaHead.of(head, _no_target), folder, target, _dtype(head))


def save_safeailab(head: HeadCheckpoint, target: str, folder: Path) -> None:
    from foredraft.heads.eagle import EagleHead
    from foredraft.heads.saving import save_safeailab_eagle3

    save_safeailab_eagle3(EagleHead.of(head, _no_target, _no_target), folder, _dtype(head))


def _dtype(head: HeadCheckpoint) -> Any:
    """The dtype of its weights."""
    return next(iter(head.tensors.values())).dtype


def _no_target(_: Any) -> Any:
    raise RuntimeError("the target is not available while its head is written")
