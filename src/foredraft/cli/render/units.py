"""Formats numbers as text; "-" or "unknown" if there is none."""

from __future__ import annotations

from foredraft.utils import units


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def milliseconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"


def bytes_text(amount: int | None) -> str:
    return "unknown" if amount is None else units.bytes_text(amount)
