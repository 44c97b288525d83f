"""The keys of a server: from options, a file, or the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from foredraft.cli.inputs import read_text
from foredraft.errors import ForedraftError

VARIABLE = "FOREDRAFT_API_KEY"


def api_keys(options: Sequence[str] | None, file: Path | None) -> tuple[str, ...]:
    """The keys of the options and of the file; if there are none, those of the environment; () if it has none either.

    Raises ForedraftError for a file without a key, and for an empty key.
    """
    of_file = [] if file is None else _lines(read_text(file))
    if file is not None and not of_file:
        raise ForedraftError(f"{file} contains no keys: give one per line")
    keys = [*(options or ()), *of_file]
    if not keys and VARIABLE in os.environ:
        keys = _lines(os.environ[VARIABLE])
        if not keys:
            raise ForedraftError(f"{VARIABLE} is empty: set it to a key, or unset it")
    if "" in keys:
        raise ForedraftError("the API key is empty: give one, or none")
    return tuple(keys)


def _lines(text: str) -> list[str]:
    """One key per line. Empty lines and those that begin with # are ignored."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
