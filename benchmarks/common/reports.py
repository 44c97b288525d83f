"""What the reports of benchmarks share."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def listed(facts: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {value}" for key, value in facts.items())


def arguments_of(args: Namespace) -> dict[str, Any]:
    """The arguments of a run, for its report. Absolute paths are shortened to their names, since they say only where this machine keeps
    its files."""
    return {name: Path(value).name if _is_absolute(value) else value for name, value in vars(args).items()}


def _is_absolute(value: object) -> bool:
    return isinstance(value, str | Path) and Path(value).is_absolute()


def save(report: Mapping[str, Any], text: str, folder: Path, *names: str) -> None:
    """Save the report as JSON and the text as Markdown, and print the text. The file name joins the names that are not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    file = "-".join(filter(None, names))
    (folder / f"{file}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"{file}.md").write_text(text)
    print(text)
