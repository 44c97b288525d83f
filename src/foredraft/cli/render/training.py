"""The messages of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.cli.render.units import bytes_text

if TYPE_CHECKING:
    from foredraft.train import MemoryForecast


def memory_text(forecast: MemoryForecast) -> str:
    """One line: the predicted peak, and its parts."""
    parts = {
        "now": forecast.before,
        "gradients": forecast.gradients,
        "optimiser": forecast.optimiser,
        "activations": forecast.activations,
        "logits": forecast.logits,
    }
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())
    return f"memory: about {bytes_text(forecast.peak)} ({listed})"
