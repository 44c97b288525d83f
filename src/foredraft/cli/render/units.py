"""Formats numbers as text; "-" or "unknown" if there is none."""

from __future__ import annotations


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def milliseconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"


def bytes_text(amount: int | None) -> str:
    if amount is None:
        return "unknown"
    value, units = float(amount), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
