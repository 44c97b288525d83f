"""The drafters that the laws are tested with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_QUICK = ("none", "suffix", "draft_model", "eagle")
"""One for each source of drafts: none, the text, a model, and hidden states."""


def all_methods(methods: Iterable[str]) -> list[Any]:
    """The methods as parameters of a test: a few always run, the others are marked slow."""
    return [method if method in _QUICK else pytest.param(method, marks=pytest.mark.slow) for method in sorted(methods)]
