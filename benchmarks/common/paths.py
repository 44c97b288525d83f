"""Where benchmarks find their data and leave their results."""

from __future__ import annotations

from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
MODELS = BENCHMARKS / ".models"
SHARED = ROOT.parent / "shared"
