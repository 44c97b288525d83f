"""Reads and writes the settings of an LLM as a TOML file, with a key for each argument."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from foredraft.errors import ForedraftError

MEASURED = "measured"
"""An optional table of the file: the measurements that the settings are based on. `Settings.read` ignores it."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "draft_model": (str,),
    "method": (str,),
    "exit_layer": (int,),
    "speculative_tokens": (int, str),
    "max_speculative_tokens": (int,),
    "speculative_token_tree": (list, str),
    "quantization": (str,),
    "draft_quantization": (str,),
    "num_threads": (int,),
    "heterogeneous_vocab": (str,),
    "head_window": (int,),
    "head_settings": (dict,),
    "draft_server": (str, dict),
    "adapt": (bool,),
}

_WORDS = {"speculative_tokens": ("auto",), "speculative_token_tree": ("auto", "none")}
"""What a setting may be if it is a string, where not every string makes sense."""

_KIND_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "a whole number",
    dict: "a table",
    list: "a list",
    bool: "true or false",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of LLM by name; None: not set."""

    model: Any = None
    draft_model: Any = None
    method: Any = None
    exit_layer: int | None = None
    speculative_tokens: int | str | None = None
    max_speculative_tokens: int | None = None
    speculative_token_tree: Sequence[Sequence[int]] | str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    num_threads: int | None = None
    heterogeneous_vocab: str | None = None
    head_window: int | None = None
    head_settings: Mapping[str, Any] | None = None
    draft_server: str | Mapping[str, Any] | None = None
    adapt: bool | None = None

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Settings:
        """Read the settings of a file. Raises ForedraftError, with the name of the file and the key, for a file that cannot be read,
        is not TOML, or has an unknown key or a value of the wrong type."""
        path = Path(file)
        values = _read(path)
        values.pop(MEASURED, None)
        for name, value in values.items():
            if name not in _KINDS:
                raise ForedraftError(f"{path}: unknown setting {name!r}: known settings are {', '.join(_KINDS)}")
            if type(value) not in _KINDS[name]:
                kinds = " or ".join(_KIND_NAMES[kind] for kind in _KINDS[name])
                raise ForedraftError(f"{path}: {name} must be {kinds}, not {value!r}")
            if isinstance(value, str) and value not in _WORDS.get(name, (value,)):
                words = " or ".join(f'"{word}"' for word in _WORDS[name])
                kinds = " or ".join(_KIND_NAMES[kind] for kind in _KINDS[name] if kind is not str)
                raise ForedraftError(f"{path}: {name} must be {kinds} or {words}, not {value!r}")
        return cls(**values)

    def write(self, file: str | os.PathLike[str], measured: Mapping[str, Any] | None = None) -> None:
        """Write the settings to a file. measured: the measurements they are based on, for people to read.

        Raises ForedraftError if the file cannot be written, and for a model or a drafter that is an object.
        """
        values = {name: value for name, value in self._values().items() if value is not None}
        for name, value in values.items():
            if not isinstance(value, _KINDS[name]):
                raise ForedraftError(
                    f"{name} cannot be written to a file: it is an object of type {type(value).__name__}, not a name"
                )
        document: dict[str, Any] = {**values, **({MEASURED: _without_none(measured)} if measured else {})}
        try:
            Path(file).write_text(tomli_w.dumps(document), encoding="utf-8")
        except OSError as error:
            raise ForedraftError(f"{file}: cannot be written: {error.strerror}") from None

    def override(self, **given: Any) -> Settings:
        """These settings with the given ones replaced; None leaves a setting as it is."""
        return Settings(**self._values() | {name: value for name, value in given.items() if value is not None})

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_measured(file: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The measurements that `Settings.write` stored in a file; empty if it holds none.

    Raises ForedraftError for a file that cannot be read or is not TOML.
    """
    measured = _read(Path(file)).get(MEASURED)
    return measured if isinstance(measured, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ForedraftError(f"{path}: not valid TOML: {error}") from None


def _without_none(table: Any) -> Any:
    """The same table without its None values, since TOML has no null."""
    if isinstance(table, Mapping):
        return {key: _without_none(value) for key, value in table.items() if value is not None}
    return [_without_none(item) for item in table] if isinstance(table, list | tuple) else table
