"""foredraft trace"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.app import app
from foredraft.errors import ForedraftError

trace = typer.Typer(no_args_is_help=True, help="Show a recording (--trace FILE).")
app.add_typer(trace, name="trace")


@trace.command()
def view(
    file: Annotated[Path, typer.Argument(help="A file that generate, demo or chat wrote with --trace.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page. Default: next to FILE, ending in .html."),
    ] = None,
) -> None:
    """Write one HTML page that shows the rounds. It opens from disk and needs no network.

    The name of the page goes to standard output.
    """
    from foredraft.trace import read_trace, write_page

    recording, page = read_trace(file), output or file.with_suffix(".html")
    if page.resolve() == file.resolve():
        raise ForedraftError(f"{page}: the page would replace the trace: give another --output")
    typer.echo(write_page(recording, page))
