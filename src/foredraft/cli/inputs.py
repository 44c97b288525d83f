"""Reads prompts, durations, amounts of memory and other input from arguments, files and pipes. Bad input raises ForedraftError."""

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


def read_prompts(prompt: str | None, file: Path | None) -> list[Prompt]:
    """The prompts of the file, or the one that is given, or else standard input as one prompt."""
    if file is not None:
        if prompt is not None:
            raise ForedraftError("give a prompt or --prompts, not both")
        return read_prompts_file(file)
    if prompt is not None and prompt != "-":
        return [prompt]
    if prompt is None and sys.stdin.isatty():
        raise ForedraftError('no prompt: give one as an argument, "-" to type it, --prompts FILE, or a pipe')
    return [_decode(sys.stdin.buffer.read(), "standard input").removesuffix("\n").removesuffix("\r")]


def read_prompts_file(file: Path) -> list[Prompt]:
    """A prompt per line; in a .jsonl file an object per line."""
    lines = read_lines(file)
    if not lines:
        raise ForedraftError(f"{file} contains no prompts: give one per line")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    return [_parse_prompt(line, f"{file}, line {number}") for number, line in lines]


def _parse_prompt(line: str, where: str) -> Prompt:
    try:
        prompt = json.loads(line)
    except ValueError as error:
        raise ForedraftError(f"{where}: not JSON ({error})") from None
    if not isinstance(prompt, dict) or not ("prompt" in prompt or "prompt_token_ids" in prompt):
        raise ForedraftError(f'{where}: needs an object with "prompt" or "prompt_token_ids"')
    return prompt


def read_lines(file: Path) -> list[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers from 1. They may end as on Windows."""
    numbered = enumerate(read_text(file).split("\n"), start=1)
    return [(number, line.removesuffix("\r")) for number, line in numbered if line.strip()]


def read_text(file: Path) -> str:
    try:
        return _decode(file.read_bytes(), str(file))
    except OSError as error:
        raise ForedraftError(f"{file}: cannot be read: {error.strerror}") from None


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ForedraftError(f"{where} is not UTF-8 text: byte {error.start} cannot be decoded") from None


def require_writable(file: Path) -> None:
    """Reject a file that cannot be written, before minutes are spent rather than after."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ForedraftError(f"{file}: cannot be written: give a file in a directory that exists")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ForedraftError(f"{file}: cannot be written: permission denied")


def parse_budget(duration: str) -> float:
    """A time to spend, in seconds; it must be above 0."""
    seconds = parse_seconds(duration)
    check_budget(seconds)
    return seconds


def parse_seconds(duration: str) -> float:
    """A time as people write it: 90, 90s, 1.5m, 2h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", duration.strip())
    if match is None:
        raise ForedraftError(f"a duration is a number followed by s, m or h, such as 90s or 2m, not {duration!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def parse_bytes(size: str) -> int:
    """An amount of memory as people write it: 512MiB, 2GB, 1000000."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise ForedraftError(
            f"{size!r} is not an amount of memory: write it like 512MiB, 2GB or a number of bytes"
        ) from None
