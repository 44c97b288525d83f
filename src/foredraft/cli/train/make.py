"""foredraft train lm, foredraft train distill, and what foredraft train head shares with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.groups import option_groups
from foredraft.cli.models import set_threads
from foredraft.cli.options import JsonOption
from foredraft.cli.render.units import bytes_text
from foredraft.cli.train.app import require_sources, train
from foredraft.cli.train.options import (
    ArchitectureOption,
    DataOptions,
    DistillationOptions,
    DocumentOptions,
    OutOption,
    RecipeOptions,
)
from foredraft.utils import startup

if TYPE_CHECKING:
    from foredraft.train import Outcome, Watch

_INTERRUPTED = 130
_CONTINUE = "give the same command again to continue"


@train.command()
@option_groups
def lm(
    out: OutOption,
    data: DataOptions,
    documents: DocumentOptions,
    recipe: RecipeOptions,
    architecture: ArchitectureOption = None,
    init: Annotated[str | None, typer.Option(help="Continue from this model instead of a new one.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The folder of the tokenizer, usually the target's. Default: that of --init."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a language model on text: a draft model for a target that uses the same tokenizer.

    Run the same command again to continue an interrupted run.
    docs/guides/training.md explains what --out contains.
    """
    check_inputs(data, recipe, architecture, init)
    from foredraft.train import Start, train_lm

    start = Start(init=init, architecture=architecture, tokenizer=tokenizer)
    with watching() as watch:
        outcome = train_lm(data.of(documents), start, recipe.recipe(is_new=init is None), out, watch)
    report(outcome, out, as_json)


@train.command()
@option_groups
def distill(
    target: Annotated[str, typer.Option(help="The model to draft for: hub id, directory or GGUF file.")],
    out: OutOption,
    data: DataOptions,
    documents: DocumentOptions,
    distillation: DistillationOptions,
    recipe: RecipeOptions,
    init: Annotated[
        str | None, typer.Option(help="A draft model to continue from; it must share the target's vocabulary.")
    ] = None,
    architecture: ArchitectureOption = None,
    layers: Annotated[
        int | None,
        typer.Option(help="A new draft: the target with this many of its layers. Default, if nothing is given: 1."),
    ] = None,
    own_head: Annotated[
        bool,
        typer.Option(
            "--own-head", help="Untie the draft's lm_head from its embeddings: this costs memory, but no time."
        ),
    ] = False,
    parallel_tokens: Annotated[
        int | None,
        typer.Option(
            "--parallel-tokens",
            help="Teach it to draft this many tokens in one pass, by means of mask tokens (PARD). Default: one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a draft model on its target's own distribution, from scratch or from an existing one.

    Run the same command again to continue an interrupted run.
    docs/guides/training.md explains what --out contains, and how to choose.
    """
    check_inputs(data, recipe, architecture, target, init)
    from foredraft.train import Start, train_distill

    start = Start(
        init=init, architecture=architecture, layers=layers, own_head=own_head, parallel_tokens=parallel_tokens
    )
    with watching() as watch:
        settings = recipe.recipe(is_new=init is None, **distillation.recipe_fields())
        outcome = train_distill(target, data.of(documents), start, settings, out, watch)
    report(outcome, out, as_json)


def check_inputs(data: DataOptions, recipe: RecipeOptions, architecture: Path | None, *models: str | None) -> None:
    """Raises ForedraftError for bad options that can be found before PyTorch is imported."""
    recipe.check()
    files = [*data.files, *([] if architecture is None else [architecture])]
    require_sources([model for model in models if model is not None], files)
    set_threads(recipe.num_threads)


@contextmanager
def watching() -> Iterator[Watch]:
    """Shows the progress of the run. Ctrl-C anywhere in it leaves a folder from which it continues."""
    from foredraft.cli.render.training import memory_text
    from foredraft.cli.render.training_progress import training_progress
    from foredraft.train import Watch

    startup.ready()
    try:
        with training_progress() as shown:
            yield Watch(
                shown.prepare,
                shown.stage,
                shown.share,
                lambda memory: shown.note(memory_text(memory)),
                shown.step,
            )
    except KeyboardInterrupt:
        typer.echo(f"stopped: {_CONTINUE}", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def report(outcome: Outcome, out: Path, as_json: bool) -> None:
    if not outcome.complete:
        typer.echo(f"stopped at step {outcome.step}: {_CONTINUE}", err=True)
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(asdict(outcome)))
        return
    first, last = outcome.history[0], outcome.history[-1]
    for kind, acceptance in last.acceptance.items():
        before = first.acceptance[kind]
        typer.echo(f"{kind}: acceptance {acceptance:.3f} (before: {before:.3f}), loss {last.loss[kind]:.3f}")
    typer.echo(
        f"{outcome.step} step{'' if outcome.step == 1 else 's'}, {outcome.num_parameters} parameters; model: {out}"
    )
    if outcome.memory is not None:
        measured, predicted = bytes_text(outcome.memory.measured), bytes_text(outcome.memory.predicted)
        typer.echo(f"memory: {measured} at its peak (predicted: {predicted})")
