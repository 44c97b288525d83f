"""foredraft check"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.app import app
from foredraft.cli.groups import Without, option_groups
from foredraft.cli.inputs import parse_budget, read_prompts_file
from foredraft.cli.models import ModelOptions
from foredraft.cli.options import JsonOption
from foredraft.cli.sampling import AllSamplingOptions, MaxTokensOption, StructureOptions

if TYPE_CHECKING:
    from foredraft.certificate import Certificate

_NOT_PASSED = 1
_BUDGET = "2m"  # as in foredraft.certificate, which is slow to import


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(AllSamplingOptions):
    max_tokens: MaxTokensOption = 96


@app.command()
@option_groups
def check(
    models: Annotated[ModelOptions, Without("cache_memory")],
    sampling: CheckOptions,
    structure: StructureOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts to complete: one per line, or a .jsonl file as for generate. Default: built in."),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="How long it may take, such as 90s or 5m. The tests are planned to fit; a busy machine may take 1.5 times as "
            "long, and the output lists what had to be left out."
        ),
    ] = _BUDGET,
    as_json: JsonOption = False,
) -> None:
    """Is speculation lossless with this target, this drafter and these settings?

    Greedy and seeded texts are compared with those of plain decoding and
    with an independent pass, sampled ones with the target's own distribution.
    Then the same tests must reject verifiers that are broken on purpose.

    The exit code is 0 if all of that holds and 1 if not. --seed also fixes
    the random numbers of the check itself: another seed tests other samples.
    """
    seconds = parse_budget(budget)
    models.check()
    models.follow()
    given = None if prompts is None else read_prompts_file(prompts)
    from foredraft.bench.failures import failure_warnings
    from foredraft.certificate import check as certify
    from foredraft.cli.render.progress import spinner

    params = sampling.params(structure.structured_outputs())
    llm = models.load()
    with spinner("checking") as show:
        certificate = certify(llm, params, prompts=given, budget=seconds, progress=show)
    warnings = failure_warnings(llm.fallbacks)
    if as_json:
        typer.echo(json.dumps(certificate.as_dict() | {"warnings": warnings}))
    else:
        _print(certificate, warnings)
    if not certificate.passed:
        raise typer.Exit(_NOT_PASSED)


def _print(certificate: Certificate, warnings: Sequence[str]) -> None:
    from foredraft.cli.render.certificate import certificate_lines, certificate_tables
    from foredraft.cli.render.console import output_console, write_lines

    console = output_console()
    for table in certificate_tables(certificate):
        console.print(table)
    write_lines(console, (f"warning: {line}" for line in warnings))
    write_lines(console, certificate_lines(certificate))
