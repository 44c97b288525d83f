"""foredraft inspect"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import read_text
from foredraft.cli.options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    Models,
    QuantizationOption,
    RevisionOption,
    ThreadsOption,
    TrustOption,
    set_threads,
)
from foredraft.errors import ForedraftError
from foredraft.model.checkpoint import EMBEDDED
from foredraft.utils import startup

if TYPE_CHECKING:
    from foredraft.model import LoadOptions
    from foredraft.tools.quality import QualityReport

_QUALITY_TOKENS = 20_000


@app.command()
def inspect(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
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
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Do these two fit, what will they cost in memory, what exactness does this machine give.

    The exit code is 0 if they fit and 2 if not. What does not fit is not loaded.

    --quality loads the target twice, one after the other: in float32, and
    as it would run. It says how much the perplexity of the text rises, and
    how often both find the same token likeliest. In --json: "quality".
    """
    models = Models.of(context)
    models.check(has_weights=load)
    if quality is not None and not load:
        raise ForedraftError("--quality has to load the target: leave out --no-load")
    text = None if quality is None else read_text(quality)
    target: str = model or str(EMBEDDED / "target")
    draft = draft_model or (None if model else str(EMBEDDED / "draft"))
    from foredraft.cli import render
    from foredraft.tools.inspection import inspect_models

    startup.ready()
    set_threads(num_threads)
    options = models.options()
    with render.spinner("inspecting"):
        found = inspect_models(target, draft, options, load=load)
    measured = None
    if text is not None and found.fits:
        measured = _measure_quality(target, text, options, quality_tokens)
    if as_json:
        typer.echo(json.dumps(found.as_dict() | {"quality": None if measured is None else asdict(measured)}))
    else:
        console = render.output_console()
        console.print(render.inspection_table(found))
        for line in [*render.inspection_lines(found), *(render.quality_lines(measured) if measured else [])]:
            console.out(line, highlight=False)
    if not found.fits:
        raise ForedraftError(found.reason)


def _measure_quality(target: str, text: str, options: LoadOptions, max_tokens: int) -> QualityReport:
    from foredraft.cli.render import spinner
    from foredraft.tools.quality import measure_quality

    with spinner("measuring quality"):
        return measure_quality(target, text, options, max_tokens=max_tokens)
