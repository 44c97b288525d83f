"""Results of an earlier command, which are replaced only with consent."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from foredraft.errors import ForedraftError


def require_consent(output: Path, overwrite: bool) -> None:
    """Ask on a terminal, before minutes are spent, whether to replace an existing file. Raises ForedraftError if not."""
    if overwrite or not output.exists():
        return
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise ForedraftError(f"{output} already exists: give --overwrite to replace it, or another --output")
    if not typer.confirm(f"{output} already exists: replace it?", err=True):
        raise ForedraftError(f"{output} is left unchanged: give another --output")
