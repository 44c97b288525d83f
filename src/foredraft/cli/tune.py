"""foredraft tune"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import budget_of, require_place
from foredraft.cli.measuring import NumPromptsOption, WorkloadOption, shares, workload_from
from foredraft.cli.options import (
    CacheMemoryOption,
    ConfigOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    IgnoreEosOption,
    JsonOption,
    MinPOption,
    ModelOption,
    Models,
    QuantizationOption,
    RevisionOption,
    SeedOption,
    ThreadsOption,
    TokensOption,
    TopKOption,
    TopPOption,
    TrustOption,
    VerificationOption,
    sampling_params,
)
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.tune import TuneResult

_DEFAULT_TOKENS = 64


@app.command()
def tune(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD",
            help="A candidate; repeatable. Several with + between them are also tried together. Default: draft_model where "
            "there is one, suffix and ngram.",
        ),
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", help="Prompts that run together; repeatable. Default: 1.")
    ] = None,
    settings_file: ConfigOption = None,
    workload: WorkloadOption = None,
    num_prompts: NumPromptsOption = None,
    max_tokens: TokensOption = _DEFAULT_TOKENS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    ignore_eos: IgnoreEosOption = False,
    verification: VerificationOption = None,
    budget: Annotated[str, typer.Option(help="How long it may take, loading included, as 90s, 2m or 1h.")] = "2m",
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the settings, for --config and LLM(config=...).")
    ] = Path("foredraft.toml"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file without asking.")] = False,
    cache_memory: CacheMemoryOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out what to use: the drafter and the number of draft tokens, or none at all.

    Runs plain decoding and every candidate at a few depths, predicts
    every other depth, runs the few best, and writes what to use as TOML.
    docs/guides/tuning.md says how, and what --json holds.
    """
    started = time.perf_counter()
    params = sampling_params(context)
    seconds = budget_of(budget)
    models = _models(context)
    models.check()
    questions = workload_from(workload, num_prompts)
    require_place(output)
    _require_consent(output, overwrite)
    llm = models.load()
    from foredraft.tune import run_tune
    from foredraft.tune.report import as_dict

    with shares("tuning") as show:
        result = run_tune(
            llm,
            methods,
            tuple(batch_size or (1,)),
            questions,
            params,
            budget=max(seconds - (time.perf_counter() - started), 0.001),
            progress=show,
        )
    _write(result, models, output)
    if as_json:
        typer.echo(json.dumps(as_dict(result)))
    else:
        _print(result)
    typer.echo(f"settings: {output}", err=True)


def _require_consent(output: Path, overwrite: bool) -> None:
    """A file that is there is replaced only where the user says so: asked on a terminal, before minutes are spent."""
    if overwrite or not output.exists():
        return
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise ForedraftError(f"{output} is there already: give --overwrite to replace it, or another --output")
    if not typer.confirm(f"{output} is there already: replace it?", err=True):
        raise ForedraftError(f"{output} stays as it is: give another --output")


def _write(result: TuneResult, models: Models, output: Path) -> None:
    from foredraft.tune import as_settings

    settings, measured = as_settings(
        result,
        model=_place(models.model),
        draft_model=_place(models.draft_model),
        quantization=models.quantization,
        draft_quantization=models.draft_quantization,
        num_threads=models.num_threads,
    )
    settings.write(output, measured)


def _models(context: typer.Context) -> Models:
    """The models of the settings file are taken, its drafter is not: that is what is to be found out."""
    from foredraft.settings import Settings

    models = Models.of(context)
    if models.settings_file is None:
        return models
    names = ("model", "draft_model", "quantization", "draft_quantization", "num_threads")
    found = Settings.read(models.settings_file).under(**{name: getattr(models, name) for name in names})
    return replace(models, settings_file=None, **{name: getattr(found, name) for name in names})


def _place(model: str | None) -> str | None:
    """A directory is found from wherever the file is read."""
    return str(Path(model).absolute()) if model is not None and Path(model).is_dir() else model


def _print(result: TuneResult) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from foredraft.cli import render
    from foredraft.tune.report import COLUMNS, sentences, table_rows

    table = Table(box=SIMPLE_HEAD)
    for head in COLUMNS:
        table.add_column(head, justify="left" if head == "method" else "right")
    for row in table_rows(result):
        table.add_row(*row)
    console = render.output_console()
    console.print(table)
    advice, *rest = sentences(result)
    for line in (*rest, advice):
        console.out(line, highlight=False)
