"""foredraft bench"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import budget_of
from foredraft.cli.measuring import NumPromptsOption, WorkloadOption, shares, workload_from
from foredraft.cli.options import (
    DEFAULT_TOKENS,
    BatchInvariantOption,
    CacheMemoryOption,
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
from foredraft.utils.folders import make_directory

if TYPE_CHECKING:
    from foredraft.bench import BenchResult


@app.command()
def bench(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="CONFIG",
            help="plain, METHOD or METHOD:TOKENS, with @N for another batch size; repeatable. The first is what the others "
            "are compared with. Default: plain, and what LLM does by itself.",
        ),
    ] = None,
    settings_file: Annotated[
        Path | None,
        typer.Option(
            "--settings", metavar="FILE", help="Settings as foredraft tune writes them; options win over the file."
        ),
    ] = None,
    workload: WorkloadOption = None,
    num_prompts: NumPromptsOption = None,
    max_tokens: TokensOption = DEFAULT_TOKENS,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts that run together.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    ignore_eos: IgnoreEosOption = False,
    verification: VerificationOption = None,
    budget: Annotated[
        str, typer.Option(help="How long to measure, as 90s, 2m or 1h: prompts are repeated until then.")
    ] = "1m",
    repeats: Annotated[
        int | None, typer.Option(help="At most so many passes over the prompts. Default: as the budget allows.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The report's directory. Default: a new one here, named after the time."),
    ] = None,
    cache_memory: CacheMemoryOption = None,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    batch_invariant: BatchInvariantOption = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure configurations against each other on your models, prompts and machine.

    Every prompt runs under every configuration in turn, over models that
    are loaded once. The report directory holds report.md, results.json,
    runs.jsonl and plots; docs/guides/benchmarking.md says what each figure is.

    --json prints results.json.
    """
    params = sampling_params(context)
    seconds = budget_of(budget)
    models = Models.of(context)
    models.check()
    from foredraft.bench.configurations import Configuration, default_configurations

    given = [Configuration.parse(text, batch_size) for text in config or []] or default_configurations(batch_size)
    questions = workload_from(workload, num_prompts)
    directory = output or Path(time.strftime("foredraft-bench-%Y%m%d-%H%M%S"))
    make_directory(directory)
    llm = models.load()
    from foredraft.bench import run_bench
    from foredraft.bench.report import as_dict, write_report

    with shares("measuring") as show:
        result = run_bench(
            llm,
            given,
            questions,
            params,
            budget=seconds,
            repeats=repeats,
            progress=show,
        )
    write_report(result, directory)
    if as_json:
        typer.echo(json.dumps(as_dict(result)))
    else:
        _print_tables(result)
    typer.echo(f"report: {directory}", err=True)


def _print_tables(result: BenchResult) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from foredraft.bench.report import facts, summary_columns
    from foredraft.cli import render

    console = render.output_console()
    names, *columns = summary_columns(result)
    at_once = max(1, (console.width - max(map(len, names))) // (max(len(cell) for one in columns for cell in one) + 3))
    for start in range(0, len(columns), at_once):
        shown = [names, *columns[start : start + at_once]]
        table = Table(box=SIMPLE_HEAD)
        for index, (head, *_) in enumerate(shown):
            table.add_column(head, justify="right" if index else "left", no_wrap=True)
        for row in list(zip(*shown, strict=True))[1:]:
            table.add_row(*row)
        console.print(table)
    for line in facts(result):
        console.out(line, highlight=False)
