"""foredraft tune"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from foredraft.cli.app import app
from foredraft.cli.groups import Without, option_groups
from foredraft.cli.inputs import parse_budget, require_writable
from foredraft.cli.models import WITHOUT_DRAFTER, ModelOptions
from foredraft.cli.options import JsonOption
from foredraft.cli.overwriting import require_consent
from foredraft.cli.sampling import MaxTokensOption
from foredraft.cli.workload import MeasuringOptions, WorkloadOptions

if TYPE_CHECKING:
    from foredraft.tune import TuneResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningOptions(MeasuringOptions):
    max_tokens: MaxTokensOption = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What to try, for how long, and where to write the result."""

    methods: Annotated[
        list[str] | None,
        Option(
            "--method",
            metavar="METHOD",
            help="A candidate; repeatable. Several joined by + are also tried together. Default: draft_model if there "
            "is one, suffix and ngram.",
        ),
    ] = None
    batch_size: Annotated[
        list[int] | None, Option("--batch-size", help="Prompts that run together; repeatable. Default: 1.")
    ] = None
    budget: Annotated[str, Option(help="How long it may take, loading included, such as 90s, 2m or 1h.")] = "2m"
    output: Annotated[
        Path, Option(metavar="FILE", help="Where to write the settings, for --config and LLM(config=...).")
    ] = Path("foredraft.toml")
    overwrite: Annotated[bool, Option("--overwrite", help="Replace that file without asking.")] = False

    def check(self) -> None:
        """Call this before minutes are spent. Raises ForedraftError for an output that cannot be written or must not be replaced."""
        require_writable(self.output)
        require_consent(self.output, self.overwrite)


@app.command()
@option_groups
def tune(
    models: Annotated[ModelOptions, WITHOUT_DRAFTER, Without("batch_invariant", "adapt")],
    sampling: TuningOptions,
    workload: WorkloadOptions,
    search: SearchOptions,
    as_json: JsonOption = False,
) -> None:
    """Find out what to use: a drafter and its number of draft tokens, or plain decoding.

    Runs plain decoding and every candidate at a few depths, predicts
    every other depth, runs the best few, and writes what to use as TOML.
    docs/guides/tuning.md explains how, and what --json contains.
    """
    started = time.perf_counter()
    params = sampling.params()
    seconds = parse_budget(search.budget)
    models = _from_settings_file(models)
    models.check()
    models.follow()
    questions = workload.read(of_sources=models.is_encoder_decoder)
    search.check()
    llm = models.for_methods(search.methods or ()).load()
    from foredraft.cli.render.measurement import print_tuning
    from foredraft.cli.render.progress import share_bar
    from foredraft.tune import run_tune
    from foredraft.tune.report import as_dict

    with share_bar("tuning") as show:
        result = run_tune(
            llm,
            search.methods,
            tuple(search.batch_size or (1,)),
            questions,
            params,
            budget=max(seconds - (time.perf_counter() - started), 0.001),
            progress=show,
        )
    result = replace(result, budget=seconds)
    _write(result, models, search.output)
    if as_json:
        typer.echo(json.dumps(as_dict(result)))
    else:
        print_tuning(result)
    typer.echo(f"settings: {search.output}", err=True)


def _write(result: TuneResult, models: ModelOptions, output: Path) -> None:
    from foredraft.tune import as_settings

    settings, measured = as_settings(
        result,
        model=_absolute(models.model),
        draft_model=_absolute(models.draft_model),
        quantization=models.quantization,
        draft_quantization=models.draft_quantization,
        num_threads=models.num_threads,
        heterogeneous_vocab=models.heterogeneous_vocab,
        head_window=models.head_window,
        head_settings=models.head_values,
    )
    settings.write(output, measured)


def _from_settings_file(models: ModelOptions) -> ModelOptions:
    """Take the models of the settings file, but not its drafter: that is what tuning finds out."""
    from foredraft.settings import Settings

    if models.settings_file is None:
        return models
    names = (
        "model",
        "draft_model",
        "quantization",
        "draft_quantization",
        "num_threads",
        "head_window",
        "heterogeneous_vocab",
    )
    given = {name: getattr(models, name) for name in names} | {"head_settings": models.head_values}
    settings = Settings.read(models.settings_file).override(**given)
    # TOML has dates, which JSON has not: as strings they are refused like any other wrong value
    head_settings = None if settings.head_settings is None else json.dumps(settings.head_settings, default=str)
    taken = {name: getattr(settings, name) for name in names}
    return replace(models, settings_file=None, head_settings=head_settings, **taken)


def _absolute(model: str | None) -> str | None:
    """A directory or file by its absolute path, so that the settings file can be read from anywhere."""
    return str(Path(model).absolute()) if model is not None and Path(model).exists() else model
