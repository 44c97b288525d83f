"""Which drafters the laws are tried with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_QUICK = ("none", "suffix", "draft_model", "eagle")
"""One for each way in which a drafter comes to its drafts: from the text, by a model, and from hidden states."""


def all_methods(methods: Iterable[str]) -> list[Any]:
    """Parameters of a test: a few methods always, the others only where slow tests run."""
    return [method if method in _QUICK else pytest.param(method, marks=pytest.mark.slow) for method in sorted(methods)]
