"""The files in deploy/ are valid, and refer only to what exists."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from foredraft import LLM
from foredraft.cli import app
from foredraft.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_NAME = re.compile(r"\bforedraft:[a-z_0-9]+|\bprocess_[a-z_]+")


@pytest.fixture(scope="module")
def served(llm: LLM) -> set[str]:
    """The names of all served metrics."""
    metrics = Metrics()
    with metrics.observing(llm):
        return {
            family.name + suffix
            for family in metrics.registry.collect()
            for suffix in _SUFFIXES.get(family.type, ("",))
        }


def options() -> set[str]:
    command: Any = get_command(app)
    return {name for option in command.commands["serve"].params for name in option.opts}


def expressions() -> Iterator[str]:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    yield dashboard["templating"]["list"][1]["query"]["query"]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["alert"]
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            yield rule["expr"]


def test_dashboard_and_alerts_name_only_served_metrics(served: set[str]) -> None:
    found = [name for expression in expressions() for name in _NAME.findall(expression)]
    assert len(found) > 30
    assert not set(found) - served


def test_the_documentation_names_only_served_metrics(served: set[str]) -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    named = set(_NAME.findall(text))
    families = {name.removesuffix("_bucket") for name in served} | served
    assert named
    assert not {name for name in named if name not in families and not any(one.startswith(name) for one in served)}


@pytest.mark.parametrize("expression", list(expressions()))
def test_the_brackets_of_an_expression_are_balanced(expression: str) -> None:
    """Label values are ignored."""
    depth: list[str] = []
    for letter in re.sub(r'"[^"]*"', "", expression):
        if letter in "([{":
            depth.append(letter)
        elif letter in ")]}":
            assert depth.pop() + letter in ("()", "[]", "{}")
    assert not depth


def test_panels_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"]
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


def test_the_unit_runs_a_command_that_exists() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "foredraft.service")
    program, command, *args = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/foredraft")
    assert command == "serve"
    assert {arg for arg in args if arg.startswith("--")} <= options()
    assert unit["Service"]["KillSignal"] == "SIGTERM"
    assert unit["Install"]["WantedBy"]


def test_the_image_is_built_from_the_lock_file() -> None:
    lines = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    installs = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    assert installs
    assert all("--constraint constraints.txt" in one for one in installs)
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    assert f"torch=={pinned[1]} " in installs[0]
    words = [word for word, _ in steps]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "HEALTHCHECK" in words
    program, command, *args = json.loads(next(rest for word, rest in steps if word == "ENTRYPOINT"))
    assert (program, command) == ("foredraft", "serve")
    assert {arg for arg in args if arg.startswith("--")} <= options()
    copied = [name for word, rest in steps if word == "COPY" for name in rest.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(allowed)
