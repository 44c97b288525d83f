"""foredraft bench"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from foredraft.cli.app import app
from foredraft.cli.groups import option_groups
from foredraft.cli.inputs import parse_budget
from foredraft.cli.models import WITHOUT_DRAFTER, ModelOptions
from foredraft.cli.options import JsonOption
from foredraft.cli.overwriting import require_consent
from foredraft.cli.workload import MeasuringOptions, WorkloadOptions
from foredraft.errors import ForedraftError
from foredraft.utils.folders import report_directory

if TYPE_CHECKING:
    from foredraft.bench import Configuration

_RESULTS = "results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModelOptions(ModelOptions):
    """The settings file is --settings here, since --config names a configuration."""

    settings_file: Annotated[
        Path | None,
        Option("--settings", metavar="FILE", help="Settings as foredraft tune writes them; options win over the file."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run, for how long, and where to report it."""

    config: Annotated[
        list[str] | None,
        Option(
            "--config",
            metavar="CONFIG",
            help="plain, METHOD or METHOD:TOKENS, with @N for another batch size; repeatable. All others are compared with "
            "the first. Default: plain, and what LLM chooses by itself.",
        ),
    ] = None
    batch_size: Annotated[int, Option("--batch-size", help="Prompts that run together.")] = 1
    budget: Annotated[
        str, Option(help="How long to measure, such as 90s, 2m or 1h; prompts are repeated until then.")
    ] = "1m"
    repeats: Annotated[
        int | None, Option(help="The most passes over the prompts. Default: as many as the budget allows.")
    ] = None
    output: Annotated[
        Path | None,
        Option(metavar="DIR", help="The report's directory. Default: a new one here, named after the time."),
    ] = None
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a report in that directory without asking.")] = False

    def configurations(self) -> list[Configuration]:
        """Raises ForedraftError for one that cannot be read."""
        from foredraft.bench.configurations import Configuration, default_configurations

        for text in self.config or ():
            _refuse_settings_file(text)
        given = [Configuration.parse(text, self.batch_size) for text in self.config or ()]
        return given or default_configurations(self.batch_size)

    @property
    def directory(self) -> Path:
        return self.output or Path(time.strftime("foredraft-bench-%Y%m%d-%H%M%S"))


@app.command()
@option_groups
def bench(
    models: Annotated[BenchModelOptions, WITHOUT_DRAFTER],
    sampling: MeasuringOptions,
    workload: WorkloadOptions,
    runs: RunOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure configurations against each other on your models, prompts and machine.

    Every prompt runs under every configuration in turn, with models that
    are loaded once. The report directory holds report.md, results.json,
    runs.jsonl and plots; docs/guides/benchmarking.md explains the figures.

    --json prints results.json.
    """
    params = sampling.params()
    seconds = parse_budget(runs.budget)
    models.check()
    models.follow()
    configurations, questions = runs.configurations(), workload.read(of_sources=models.is_encoder_decoder)
    directory = runs.directory
    require_consent(directory / _RESULTS, runs.overwrite)
    with report_directory(directory):
        llm = models.for_methods([each.method for each in configurations if isinstance(each.method, str)]).load()
        from foredraft.bench import run_bench
        from foredraft.bench.report import as_dict, write_report
        from foredraft.cli.render.measurement import print_bench
        from foredraft.cli.render.progress import share_bar

        with share_bar("measuring") as show:
            result = run_bench(
                llm, configurations, questions, params, budget=seconds, repeats=runs.repeats, progress=show
            )
        write_report(result, directory)
    if as_json:
        typer.echo(json.dumps(as_dict(result)))
    else:
        print_bench(result)
    typer.echo(f"report: {directory}", err=True)


def _refuse_settings_file(text: str) -> None:
    """Other commands take the settings file as --config."""
    file = Path(text)
    if file.suffix == ".toml" or (file.suffix and file.is_file()):
        raise ForedraftError(
            f"--config {text}: takes a configuration, such as suffix:4: give the file as --settings {text}"
        )
