"""Numbers with units, as text."""

from __future__ import annotations


def bytes_text(amount: float) -> str:
    """An amount of memory in the largest unit of which it has at least one: "512 bytes", "1.5 MiB"."""
    value, units = float(amount), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
