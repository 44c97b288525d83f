"""Functions stay small: half of them within 6 lines, nine of ten within 18, and none above 60 but numerical routines."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "foredraft"

LONGEST = 60
ROUTINES = {"gpu/programs.py"}
"""Triton programs, which would not benefit from being split."""


def function_lengths() -> Iterator[tuple[str, str, int]]:
    """(file, function, number of lines from `def` to the end) for every function of the package."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield path.relative_to(SOURCE).as_posix(), node.name, node.end_lineno - node.lineno + 1


def test_functions_are_short() -> None:
    lengths = [length for _, _, length in function_lengths()]
    assert statistics.median(lengths) <= 6
    assert statistics.quantiles(lengths, n=10)[-1] <= 18


def test_no_function_is_long() -> None:
    assert [found for found in function_lengths() if found[2] > LONGEST and found[0] not in ROUTINES] == []
