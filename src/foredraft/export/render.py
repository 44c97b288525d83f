"""Writes configurations as text: commands, YAML and Python."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml


def as_command(program: Sequence[str], options: Mapping[str, Any]) -> str:
    """A shell command, one option a line. options: by name, without "--" and with underscores. The value True stands for an option
    without a value; other values that are not strings are written as JSON."""
    lines = [shlex.join(program), *(shlex.join(_words(name, value)) for name, value in options.items())]
    return " \\\n  ".join(lines) + "\n"


def command_words(options: Mapping[str, Any]) -> list[str]:
    """The same options as a list of arguments."""
    return [word for name, value in options.items() for word in _words(name, value)]


def as_yaml(document: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)
    return text


def as_call(function: str, *arguments: Any, **options: Any) -> str:
    """A Python call, one argument a line."""
    given = [repr(argument) for argument in arguments] + [f"{name}={value!r}" for name, value in options.items()]
    return f"{function}(\n" + "".join(f"    {one},\n" for one in given) + ")"


class Code(str):
    """A Python expression, which is written verbatim."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _words(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    return [option, value if isinstance(value, str) else json.dumps(value)]
