"""Numbers with units, as text."""

from __future__ import annotations

import pytest

from foredraft.utils.units import bytes_text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (300_000, "293.0 KiB"),
        (3 << 19, "1.5 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_an_amount_has_the_largest_unit_that_fits(amount: int, text: str) -> None:
    assert bytes_text(amount) == text
