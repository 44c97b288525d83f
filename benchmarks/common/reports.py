"""What reports of benchmarks have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def listed(facts: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {value}" for key, value in facts.items())


def save(report: Mapping[str, Any], text: str, folder: Path, *names: str) -> None:
    """As JSON and as text, in files that are called by all names that are not empty; the text is printed too."""
    folder.mkdir(parents=True, exist_ok=True)
    file = "-".join(filter(None, names))
    (folder / f"{file}.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / f"{file}.md").write_text(text)
    print(text)
