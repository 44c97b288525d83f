from __future__ import annotations

import importlib.util
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.cli.models import ModelOptions
from foredraft.cli.serve.command import _load_in_replica
from foredraft.cli.serve.options import ReplicaOptions
from foredraft.settings import Settings


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
        (["--replicas", "2", "--device-map", "auto"], "--device-map spreads one engine"),
        (["--replicas", "2", "--tp-plan", "auto"], "--tp-plan spreads one engine"),
    ],
)
def test_incompatible_options_are_named(options: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", *options])
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_replica_gets_the_settings_not_the_path_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    Settings(method="suffix", speculative_tokens=3, max_speculative_tokens=5, num_threads=1).write(file)
    models = ModelOptions(settings_file=file, speculative_tokens="2")
    assert ReplicaOptions(replicas=2).cluster(models, 8).threads_per_replica == 1  # type: ignore[union-attr]
    make_llm = pickle.dumps(partial(_load_in_replica, models, models.settings(), {"max_num_seqs": 8}))
    file.unlink()
    llm = pickle.loads(make_llm)(1)
    assert (llm.method, llm.speculative_tokens) == ("suffix", 2)  # an option overrides the file
