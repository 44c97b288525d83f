"""foredraft export"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from foredraft.cli.app import app
from foredraft.cli.groups import Without, option_groups
from foredraft.cli.models import DRAFT_SERVER, ModelOptions
from foredraft.errors import ForedraftError
from foredraft.export import ENGINES, Engine, choice_of
from foredraft.settings import read_measured

_NOT_EXPORTED = Without(
    "min_acceptance_rate",
    "max_draft_memory",
    "head_window",
    "head_settings",
    "adapt",
    "cache_memory",
    "dtype",
    "device",
    "device_map",
    "tp_plan",
    "batch_invariant",
    "revision",
    "trust_remote_code",
    "num_threads",
    *DRAFT_SERVER,
)


@app.command()
@option_groups
def export(
    engine: Annotated[str, Option("--to", metavar="ENGINE", help=f"One of {', '.join(ENGINES)}.")],
    models: Annotated[ModelOptions, _NOT_EXPORTED],
    head_output: Annotated[
        Path | None,
        Option(
            "--head-output", metavar="DIR", help="Write the head to this directory, in the form that the engine loads."
        ),
    ] = None,
) -> None:
    """Export the drafter and its number of draft tokens to another engine.

    Prints that engine's own configuration on standard output, and what
    will be different there on standard error. Settings that the engine
    cannot express are rejected, with the nearest ones that it can.
    """
    if engine not in ENGINES:
        raise ForedraftError(f"unknown engine {engine!r}: give one of {', '.join(ENGINES)}")
    models.check(has_weights=False)
    exporter = ENGINES[engine]
    text, differences = exporter.export(choice_of(models.settings()), head_output)
    typer.echo(text, nl=False)
    measured = {} if models.settings_file is None else read_measured(models.settings_file)
    for line in [*_measured(measured), *_announced(exporter, differences)]:
        typer.echo(line, err=True)


def _measured(measured: Mapping[str, Any]) -> list[str]:
    """What the settings file says about the measurement that it comes from."""
    if "advice" not in measured:
        return []
    where = ", ".join(str(measured[name]) for name in ("processor", "date") if name in measured)
    return [f"Measured with foredraft{f' ({where})' if where else ''}: {measured['advice']}"]


def _announced(engine: Engine, differences: tuple[str, ...]) -> list[str]:
    return [f"Differences with {engine.title} {engine.version}:", *(f"- {each}" for each in differences)]
