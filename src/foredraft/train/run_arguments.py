"""How the arguments of two runs differ, in the words of the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

_LENGTH = ("steps", "epochs", "seconds")
_OPTIONS = {
    "seconds": "--budget",
    "matrices": "--muon-learning-rate",
    "others": "--learning-rate",
    "temperatures": "--temperature",
    "are_pairs": "--pairs",
    "num_steps": "--unroll",
    "num_heads": "--heads",
    "shares_lm_head": "--share-lm-head",
}
"""The options whose names are not those of the fields."""


def difference(stored: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """The first argument that differs, as what follows "a run"; None if none does. stored, given: by the names of training.json."""
    before, now = _flat(stored), _flat(given)
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return _described(name, before, now)
    return None


def _flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the learning rates among them."""
    rates = arguments.get("rates")
    return {name: value for name, value in arguments.items() if name != "rates"} | dict(rates or {})


def _described(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if name == "command":
        return f"of train {before.get(name)}, not of train {now.get(name)}"
    if name == "data":
        return _described_files(before.get(name) or {}, now.get(name) or {})
    names = _LENGTH if name in _LENGTH else (name,)
    was, is_now = (" ".join(word for each in names for word in _words(each, of.get(each))) for of in (before, now))
    if not was:
        return f"without {is_now}"
    return f"with {was}, not {is_now}" if is_now else f"with {was}"


def _described_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """before, now: checksums by the names of the files. Only the names are shown."""
    gone, new = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    if gone or new:
        return f"with other data: {', '.join(gone) or 'nothing'}, not {', '.join(new) or 'nothing'}"
    return f"with other contents of {', '.join(file for file in before if before[file] != now[file])}"


def _words(name: str, value: Any) -> Iterator[str]:
    """The option with its value, as it is given on the command line; nothing for one that is not given."""
    option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    if value is True:
        yield option
    elif isinstance(value, Mapping):
        yield from (word for kind, file in value.items() for word in _words(name, f"{kind}={file}"))
    elif isinstance(value, list):
        yield from (word for item in value for word in _words(name, item))
    elif value is not None and value is not False:
        yield f"{option} {_text(name, value)}"


def _text(name: str, value: Any) -> str:
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{number}s" if name == "seconds" else shlex.quote(number)
