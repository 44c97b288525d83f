"""A worker reads from its command line what the runner wrote there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.workers import client
from benchmarks.peers.workers.protocol import Settings, settings_from_command_line


def test_settings_are_passed_by_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(Path("models"), "q4_k_m", 2, 16, "ngram", 4, 4608, 3)
    monkeypatch.setattr("sys.argv", ["worker", *client._arguments(settings)])
    assert settings_from_command_line() == settings
