"""The settings of an LLM in a file: TOML, flat, a key for each argument that it may hold."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from foredraft.errors import ForedraftError

MEASURED = "measured"
"""The one table that a file may hold: what the settings were chosen by. Readers pass it over."""

_KINDS: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "draft_model": (str,),
    "method": (str,),
    "speculative_tokens": (int, str),
    "max_speculative_tokens": (int,),
    "quantization": (str,),
    "draft_quantization": (str,),
    "num_threads": (int,),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of LLM, by their names; None where nothing is said."""

    model: Any = None
    draft_model: Any = None
    method: Any = None
    speculative_tokens: int | str | None = None
    max_speculative_tokens: int | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    num_threads: int | None = None

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> Settings:
        """Raises ForedraftError, naming the file and the key, for what cannot be read, is no TOML, or is not known."""
        path = Path(file)
        try:
            found = tomllib.loads(path.read_bytes().decode())
        except OSError as error:
            raise ForedraftError(f"{path}: cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ForedraftError(f"{path}: no TOML: {error}") from None
        found.pop(MEASURED, None)
        for name, value in found.items():
            if name not in _KINDS:
                raise ForedraftError(f"{path}: unknown setting {name!r}: known are {', '.join(_KINDS)}")
            if isinstance(value, bool) or not isinstance(value, _KINDS[name]):
                kinds = " or ".join({str: "a text", int: "a whole number"}[kind] for kind in _KINDS[name])
                raise ForedraftError(f"{path}: {name} must be {kinds}, not {value!r}")
        return cls(**found)

    def write(self, file: str | os.PathLike[str], measured: Mapping[str, Any] | None = None) -> None:
        """measured: what the choice rests on, for people to read. Raises ForedraftError where it cannot be written, and for
        a model or a drafter that has no name."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}
        for name, value in found.items():
            if not isinstance(value, _KINDS[name]):
                raise ForedraftError(f"{name} cannot be written to a file: it is {type(value).__name__}, not a name")
        document: dict[str, Any] = {**found, **({MEASURED: _without_none(measured)} if measured else {})}
        try:
            Path(file).write_text(tomli_w.dumps(document), encoding="utf-8")
        except OSError as error:
            raise ForedraftError(f"{file}: cannot be written: {error.strerror}") from None

    def under(self, **given: Any) -> Settings:
        """What is given wins; None gives nothing."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return Settings(**own | {name: value for name, value in given.items() if value is not None})


def _without_none(table: Any) -> Any:
    """TOML has no null."""
    if isinstance(table, Mapping):
        return {key: _without_none(value) for key, value in table.items() if value is not None}
    return [_without_none(one) for one in table] if isinstance(table, list | tuple) else table
