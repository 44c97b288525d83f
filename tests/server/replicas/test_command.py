from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_all_but_ray(name: str, *args: Any) -> Any:
        return None if name == "ray" else find(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find_all_but_ray)
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--port", "0"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "pip install 'foredraft[ray]'" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--max-replicas", "2"], "give --replicas too"),
        (["--ray-address", "auto"], "give --replicas too"),
        (["--replicas", "3", "--max-replicas", "2"], "max_replicas must be at least num_replicas"),
        (["--replicas", "2", "--device", "cuda:1"], "--device cuda"),
    ],
)
def test_what_does_not_go_together_is_named(options: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert result.exit_code == 2
    assert expected in result.stderr
