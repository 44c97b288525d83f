"""Values on the command line: amounts, durations, prompts."""

from __future__ import annotations

import pytest

from foredraft.cli.inputs import parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"), [("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1000000", 1_000_000), ("1.5 KiB", 1536)]
)
def test_an_amount_of_memory_may_have_a_unit(size: str, expected: int) -> None:
    assert parse_bytes(size) == expected
