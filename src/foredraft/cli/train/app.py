"""The group of commands, and the checks that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from foredraft.cli.app import app
from foredraft.errors import ForedraftError
from foredraft.model.checkpoint import refuse_unusable

train = typer.Typer(no_args_is_help=True, help="Train a draft model for a target, and evaluate it.")
app.add_typer(train, name="train")


def require_sources(models: Iterable[str], files: Iterable[Path]) -> None:
    """Raises ForedraftError for a model that cannot be loaded, and for a file that does not exist."""
    for model in models:
        refuse_unusable(model)
    for file in files:
        if not file.is_file():
            raise ForedraftError(f"{file}: cannot be read: {'it is a directory' if file.is_dir() else 'no such file'}")


def parse_named(items: Sequence[str] | None, option: str, form: str = "NAME=FILE") -> dict[str, str]:
    """items: values of this option, each of the given form. Raises ForedraftError for any other form, and for a name that is given twice."""
    named: dict[str, str] = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise ForedraftError(f"{option} takes {form}, not {item!r}")
        if name in named:
            raise ForedraftError(f"{option}: {name!r} is given twice: give each {form.partition('=')[0]} once")
        named[name] = value
    return named
