"""foredraft inspect"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.groups import Without, option_groups
from foredraft.cli.inputs import read_text
from foredraft.cli.models import WITHOUT_DRAFTER, ModelOptions, set_threads
from foredraft.cli.options import JsonOption
from foredraft.engine.embedded_models import with_embedded_models
from foredraft.errors import ForedraftError
from foredraft.sampling import AUTO
from foredraft.utils import startup

if TYPE_CHECKING:
    from foredraft.tools.inspection import Inspection
    from foredraft.tools.quality import QualityReport

_QUALITY_TOKENS = 20_000
_NOT_INSPECTED = Without(
    "settings_file",
    "cache_memory",
    "draft_quantization",
    "device_map",
    "tp_plan",
    "batch_invariant",
    "head_window",
    "head_settings",
    "adapt",
)


@app.command()
@option_groups
def inspect(
    models: Annotated[
        ModelOptions,
        WITHOUT_DRAFTER,
        _NOT_INSPECTED,
    ],
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Load the models and measure, or only predict.")
    ] = True,
    quality: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXTFILE", help="Also measure what the precision costs on this text: the target against float32."
        ),
    ] = None,
    quality_tokens: Annotated[
        int, typer.Option("--quality-tokens", help="The most tokens of that text to use.")
    ] = _QUALITY_TOKENS,
    coverage: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXTFILE",
            help="With a head: also the share of this text's tokens that it can draft. With a draft model: compare the "
            "vocabularies on this text.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Do two models fit together, how much memory will they take, and how exact is this machine?

    --draft-model may be a head of the target: the report says what it reads
    and drafts, and what a draft token costs compared with a pass of the target.

    For a draft model with another vocabulary: the share of its ids that agree
    in place with the target's on a text, the bytes per id of both, and how
    drafts would be verified (slem or tli). With --no-load this needs no weights.

    The exit code is 0 if they fit and 2 if not. Models that do not fit are not loaded.

    --quality loads the target twice, one after the other: in float32, and
    as it would run. It reports how much the perplexity of the text rises,
    and how often both have the same most likely token. In --json: "quality".
    """
    models.check(has_weights=load)
    if quality is not None and not load:
        raise ForedraftError("--quality has to load the target: leave out --no-load")
    text = None if quality is None else read_text(quality)
    covered = None if coverage is None else read_text(coverage)
    if covered is not None and not covered.strip():
        raise ForedraftError(f"{coverage} contains no text: give text of the kind that the model will write")
    inspection = _inspect(models, load, covered)
    if coverage is not None and inspection.head is None and inspection.draft is None:
        raise ForedraftError("--coverage is about a draft's vocabulary: give --draft-model")
    report = None if text is None or not inspection.fits else _measure_quality(models, text, quality_tokens)
    if as_json:
        typer.echo(json.dumps(inspection.as_dict() | {"quality": None if report is None else asdict(report)}))
    else:
        _print(inspection, report)
    if not inspection.fits:
        raise ForedraftError(inspection.reason)


def _named(models: ModelOptions) -> tuple[str, str | None]:
    """The names of the target and of the draft model, if there is one."""
    settings = with_embedded_models(models.settings())
    return str(settings.model), None if settings.draft_model is None else str(settings.draft_model)


def _inspect(models: ModelOptions, load: bool, text: str | None) -> Inspection:
    from foredraft.cli.render.progress import spinner
    from foredraft.tools.inspection import inspect_models

    target, draft = _named(models)
    startup.ready()
    set_threads(models.num_threads)
    with spinner("inspecting"):
        return inspect_models(
            target,
            draft,
            models.load_options(),
            load=load,
            text=text,
            heterogeneous_vocab=models.heterogeneous_vocab or AUTO,
        )


def _measure_quality(models: ModelOptions, text: str, max_tokens: int) -> QualityReport:
    from foredraft.cli.render.progress import spinner
    from foredraft.tools.quality import measure_quality

    with spinner("measuring quality"):
        return measure_quality(_named(models)[0], text, models.load_options(), max_tokens=max_tokens)


def _print(inspection: Inspection, quality: QualityReport | None) -> None:
    from foredraft.cli.render.console import output_console, write_lines
    from foredraft.cli.render.inspection import head_table, inspection_lines, inspection_table, quality_lines

    console = output_console()
    console.print(inspection_table(inspection))
    if inspection.head is not None:
        console.print(head_table(inspection.head))
    write_lines(console, inspection_lines(inspection))
    if quality is not None:
        write_lines(console, quality_lines(quality))
