"""Prompts, durations and other text from arguments, files and pipes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.errors import ForedraftError
from foredraft.utils.arguments import check_budget

if TYPE_CHECKING:
    from foredraft.text.request import Prompt


def prompts_from(prompt: str | None, file: Path | None) -> list[Prompt]:
    if file is not None:
        if prompt is not None:
            raise ForedraftError("give a prompt or --prompts, not both")
        return prompts_of(file)
    if prompt is not None and prompt != "-":
        return [prompt]
    if prompt is None and sys.stdin.isatty():
        raise ForedraftError('no prompt: give one as an argument, "-" to type it, --prompts FILE, or a pipe')
    return [decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")]


def prompts_of(file: Path) -> list[Prompt]:
    lines = [(number, line) for number, line in enumerate(read_text(file).split("\n"), start=1) if line.strip()]
    if not lines:
        raise ForedraftError(f"{file} holds no prompt: give one per line")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_prompt_of(line, f"{file}, line {number}") for number, line in lines]


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ForedraftError(f"{where}: no JSON ({error})") from None
    if not isinstance(found, dict) or not ("prompt" in found or "prompt_token_ids" in found):
        raise ForedraftError(f'{where}: needs an object with "prompt" or "prompt_token_ids"')
    return found


def read_text(file: Path) -> str:
    try:
        return decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise ForedraftError(f"{file}: cannot be read: {error.strerror}") from None


def decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ForedraftError(f"{where} is no UTF-8 text: byte {error.start} cannot be decoded") from None


def require_place(file: Path) -> None:
    """Raises ForedraftError for a file that cannot be written: better before minutes are spent than after."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ForedraftError(f"{file}: cannot be written: give a file in a directory that exists")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ForedraftError(f"{file}: cannot be written: permission denied")


def budget_of(duration: str) -> float:
    """A time to spend, in seconds. Raises ForedraftError for one in which nothing can be done."""
    seconds = seconds_of(duration)
    check_budget(seconds)
    return seconds


def seconds_of(duration: str) -> float:
    """A time as people write it: 90, 90s, 1.5m, 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", duration.strip())
    if match is None:
        raise ForedraftError(f"a duration is a number with s, m or h behind it, as 90s or 2m, not {duration!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
