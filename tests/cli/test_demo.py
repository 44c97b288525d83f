"""foredraft demo."""

from __future__ import annotations

import re

from foredraft.tools.demo import DEMO_PROMPT
from tests.command_line import QUICK, json_lines, run


def test_demo_streams_its_text_and_then_a_table() -> None:
    result = run("demo", "--max-tokens", "12", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(DEMO_PROMPT)
    assert "accepted draft token" in result.stdout
    assert re.search(r"texts identical +yes", result.stdout)
    for row in (
        "tokens/s +[0-9.]+ +[0-9.]+",
        "inter-token latency",
        "draft acceptance rate",
        "α",
        "τ",
        "speedup +[0-9]",
    ):
        assert re.search(row, result.stdout)
    assert result.stderr == ""


def test_demo_as_json() -> None:
    (found,) = json_lines(run("demo", "--max-tokens", "8", "--json", *QUICK))
    assert found["identical"] is True
    assert found["num_tokens"] == 8
