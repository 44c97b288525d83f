"""Finds the best settings for the user's models, prompts and machine: measures, predicts, runs the few best, and advises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.tune.advise import Advice, Finalist, TuneResult, run_tune
    from foredraft.tune.predict import Prediction
    from foredraft.tune.report import as_settings

__all__ = ["Advice", "Finalist", "Prediction", "TuneResult", "as_settings", "run_tune"]

__getattr__ = attributes(
    __name__,
    {
        "advise": ("Advice", "Finalist", "TuneResult", "run_tune"),
        "predict": ("Prediction",),
        "report": ("as_settings",),
    },
)
