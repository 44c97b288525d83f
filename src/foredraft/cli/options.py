"""Options of several commands that belong to no group."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

TraceOption = Annotated[
    Path | None, Option("--trace", metavar="FILE", help="Record every round in this file; see foredraft trace view.")
]
JsonOption = Annotated[bool, Option("--json", help="Write JSON to standard output, and nothing else.")]
