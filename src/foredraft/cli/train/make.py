"""foredraft train lm, foredraft train distill"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from foredraft.cli.groups import option_groups
from foredraft.cli.models import set_threads
from foredraft.cli.options import JsonOption
from foredraft.cli.train.app import require_sources, train
from foredraft.cli.train.options import (
    ArchitectureOption,
    DataOptions,
    DistillationOptions,
    DocumentOptions,
    OutOption,
    RecipeOptions,
)
from foredraft.errors import ForedraftError
from foredraft.utils import startup

if TYPE_CHECKING:
    from foredraft.train import Outcome, Watch

_INTERRUPTED = 130


class _HeadKind(NamedTuple):
    """name: of the class in foredraft.train. options: its fields that the command sets. needed: those that must be given."""

    name: str
    options: tuple[str, ...]
    needed: tuple[str, ...] = ()


_HEAD_KINDS = {
    "eagle3": _HeadKind(
        "Eagle3Kind",
        (
            "taps",
            "draft_vocab_size",
            "layers",
            "intermediate_size",
            "shares_lm_head",
            "num_steps",
            "decay",
        ),
    ),
    "medusa": _HeadKind("MedusaKind", ("num_heads", "layers", "draft_vocab_size", "own_lm_heads", "decay")),
    "exit": _HeadKind("ExitKind", ("exit_layer", "adapter_size"), ("exit_layer",)),
}
_FLAGS = {"num_steps": "--unroll", "num_heads": "--heads", "shares_lm_head": "--share-lm-head"}


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
    """Train a language model from text: a draft for a target that uses the same tokenizer.

    Give the same command again to continue after a kill. docs/guides/training.md
    says what is written to --out.
    """
    _check(data, recipe, architecture, init)
    from foredraft.train import Start, train_lm

    start = Start(init=init, architecture=architecture, tokenizer=tokenizer)
    with _watch() as watch:
        outcome = train_lm(data.of(documents), start, recipe.recipe(is_new=init is None), out, watch)
    _report(outcome, out, as_json)


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
        bool, typer.Option("--own-head", help="Untie the draft's head from its embeddings: memory, no time.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a draft for a target from the target's own distribution, or fit an existing draft.

    Give the same command again to continue after a kill. docs/guides/training.md
    says what is written to --out, and how to choose.
    """
    _check(data, recipe, architecture, target, init)
    from foredraft.train import Start, train_distill

    start = Start(init=init, architecture=architecture, layers=layers, own_head=own_head)
    with _watch() as watch:
        settings = recipe.recipe(is_new=init is None, **distillation.recipe_fields())
        outcome = train_distill(target, data.of(documents), start, settings, out, watch)
    _report(outcome, out, as_json)


@train.command()
@option_groups
def head(
    target: Annotated[str, typer.Option(help="The model to draft for: hub id, directory or GGUF file.")],
    out: OutOption,
    data: DataOptions,
    documents: DocumentOptions,
    distillation: DistillationOptions,
    recipe: RecipeOptions,
    kind: Annotated[str, typer.Option(help="What to train: eagle3, medusa, or exit (an early exit).")] = "eagle3",
    init: Annotated[str | None, typer.Option(help="A head of this kind and target to train further.")] = None,
    taps: Annotated[
        list[int] | None,
        typer.Option(help="EAGLE-3: a layer whose input the head reads; repeatable. Default: three of them."),
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", help="Draft only the ids that occur most often. Default: all.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Of an EAGLE-3 head, or blocks of each Medusa head. Default: 1.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option("--intermediate-size", help="Of the head's MLP. Default: the target's.")
    ] = None,
    share_lm_head: Annotated[
        bool,
        typer.Option("--share-lm-head", help="Keep the target's lm_head: a smaller file, less to train and to learn."),
    ] = False,
    unroll: Annotated[int | None, typer.Option(help="How many drafted tokens deep the loss goes. Default: 5.")] = None,
    decay: Annotated[
        float | None, typer.Option(help="The weight of a drafted token over that of the one before it. Default: 0.8.")
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option("--heads", help="Medusa: heads, each for one more drafted token. Default: 4.")
    ] = None,
    own_lm_heads: Annotated[
        bool, typer.Option("--own-lm-heads", help="Medusa: an lm_head for each head, in place of a shared one.")
    ] = False,
    exit_layer: Annotated[
        int | None, typer.Option("--exit-layer", help="How many of the target's layers an early exit runs.")
    ] = None,
    adapter_size: Annotated[
        int | None,
        typer.Option(
            "--adapter-size", help="How wide an exit's adapter is; 0: a norm alone. Default: the target's width."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a head for a target: it drafts from the target's own hidden states.

    Give the same command again to continue after a kill. docs/guides/heads.md
    says what a head is, and what is written to --out.
    """
    options = {
        "taps": tuple(taps) if taps else None,
        "draft_vocab_size": draft_vocab_size,
        "layers": layers,
        "intermediate_size": intermediate_size,
        "shares_lm_head": share_lm_head or None,
        "num_steps": unroll,
        "decay": decay,
        "num_heads": num_heads,
        "own_lm_heads": own_lm_heads or None,
        "exit_layer": exit_layer,
        "adapter_size": adapter_size,
    }
    given = _options_of(kind, options)
    _check(data, recipe, None, target, init)
    from foredraft import train as training

    head_kind = getattr(training, _HEAD_KINDS[kind].name)(**given, init=init)
    with _watch() as watch:
        settings = recipe.recipe(is_new=init is None, **distillation.recipe_fields())
        outcome = training.train_head(target, data.of(documents), head_kind, settings, out, watch)
    _report(outcome, out, as_json)


def _options_of(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that are given. Raises ForedraftError for one that this kind does not have, and one that it needs."""
    known = _HEAD_KINDS.get(kind)
    if known is None:
        raise ForedraftError(f"--kind must be one of {', '.join(_HEAD_KINDS)}, not {kind!r}")
    given = {name: value for name, value in options.items() if value is not None}
    unusable = next((name for name in given if name not in known.options), None)
    missing = next((name for name in known.needed if name not in given), None)
    if unusable is not None:
        raise ForedraftError(f"{_flag(unusable)} is not for --kind {kind}: leave it out")
    if missing is not None:
        raise ForedraftError(f"--kind {kind} needs {_flag(missing)}")
    return given


def _flag(name: str) -> str:
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def _check(data: DataOptions, recipe: RecipeOptions, architecture: Path | None, *models: str | None) -> None:
    """Refuse what can be refused before PyTorch is imported."""
    recipe.check()
    files = [*data.files, *([] if architecture is None else [architecture])]
    require_sources([model for model in models if model is not None], files)
    set_threads(recipe.num_threads)


@contextmanager
def _watch() -> Iterator[Watch]:
    """Shows the run as a bar on a terminal."""
    from foredraft.cli.render.progress import training_bar
    from foredraft.train import Watch

    startup.ready()
    with training_bar() as bar:
        yield Watch(bar.stage, bar.share, lambda step: bar.step(step.progress, step.loss, step.acceptance))


def _report(outcome: Outcome, out: Path, as_json: bool) -> None:
    if not outcome.complete:
        typer.echo(f"stopped at step {outcome.step}: give the same command again to continue", err=True)
        raise typer.Exit(_INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(asdict(outcome)))
        return
    first, last = outcome.history[0], outcome.history[-1]
    for kind, acceptance in last.acceptance.items():
        before = first.acceptance[kind]
        typer.echo(f"{kind}: acceptance {acceptance:.3f} (before: {before:.3f}), loss {last.loss[kind]:.3f}")
    typer.echo(f"{outcome.step} steps, {outcome.num_parameters} parameters; model: {out}")
