"""foredraft compared with the fastest other program."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.peers.leads import leads, table


def row(system: str, mode: str, *seconds: float, gamma: int = 0) -> dict[str, Any]:
    rate = len(seconds) / sum(seconds)
    return {"system": system, "mode": mode, "gamma": gamma, "tokens_per_second": rate, "seconds": list(seconds)}


ROWS = [
    row("foredraft-int4", "plain", 1.0, 2.0, 4.0),
    row("foredraft-q4_0", "plain", 9.0, 9.0, 9.0),
    row("foredraft-int4", "suffix", 1.0, 1.0, 1.0, gamma=3),
    row("llamacpp-q4_0", "plain", 3.0, 4.0, 4.0),
    row("openvino-int4", "plain", 5.0, 5.0, 5.0),
    row("openvino-int4", "ngram", 0.5, 0.5, 2.0, gamma=2),
    row("foredraft-int8", "plain", 1.0, 1.0, 1.0),
    row("llamacpp-bf16", "plain", 1.0, 1.0, 1.0),
]


def test_the_fastest_of_both_sides_are_compared_request_by_request() -> None:
    plain, drafting = leads(ROWS)
    assert (plain["bits"], plain["foredraft"], plain["other"]) == (4, "foredraft-int4", "llamacpp-q4_0")
    assert plain["ratio"] == pytest.approx(2.0)
    assert (drafting["foredraft"], drafting["other"]) == ("foredraft-int4 suffix, γ = 3", "openvino-int4 ngram, γ = 2")
    assert drafting["ratio"] == pytest.approx(0.5)


def test_a_missing_side_gives_no_line() -> None:
    assert leads(ROWS[:3]) == []
    assert table(ROWS[:3]) == ""


def test_each_lead_gives_a_line() -> None:
    assert table(ROWS).count("\n") == 1 + len(leads(ROWS))
    assert "| 4 | plain | foredraft-int4 | llamacpp-q4_0 | 2.00 (" in table(ROWS)
