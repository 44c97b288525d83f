"""Reads trace files and checks that they are consistent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from foredraft.errors import ForedraftError
from foredraft.trace.format import (
    LINE,
    VERSION,
    Counts,
    EndLine,
    Footer,
    Header,
    Line,
    RoundLine,
    StepLine,
    TextLine,
    TextTrace,
    Trace,
)


def read_trace(path: str | PathLike[str]) -> Trace:
    """Read a trace file. Raises ForedraftError if it is not a trace, has another version, or contradicts itself.

    A recording that breaks off is read as far as it goes: its last line may be incomplete, and `is_complete` is False.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ForedraftError(f"{path}: not a trace: byte {error.start} is not UTF-8") from None
    builder = _Builder(str(path))
    for number, line in _lines(text, str(path)):
        builder.add(number, line)
    return builder.trace()


def _lines(text: str, name: str) -> Iterator[tuple[int, Line]]:
    # split at \n only: a token may contain any other line separator
    *whole, rest = text.split("\n")
    if not whole:
        raise ForedraftError(
            f"{name}: not a trace: its first line must be a header, as foredraft generate --trace writes"
        )
    _check_header(whole[0], name)
    for number, line in enumerate(whole, start=1):
        yield number, _parsed(line, f"{name}, line {number}")
    if rest:  # either complete except for its line end, or the line that was being written
        try:
            yield len(whole) + 1, LINE.validate_json(rest)
        except ValidationError:
            return


def _check_header(line: str, name: str) -> None:
    """Check the type and the version before anything else."""
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("type") != "trace":
        raise ForedraftError(
            f"{name}: not a trace: its first line must be a header, as foredraft generate --trace writes"
        )
    if header.get("version") != VERSION:
        raise ForedraftError(
            f"{name}: version {header.get('version')!r} of the trace format, but this version of foredraft reads version {VERSION}"
        )


def _parsed(line: str, where: str) -> Line:
    try:
        return LINE.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ForedraftError(f"{where}: {path + ': ' if path else ''}{first['msg']}") from None


@dataclass(slots=True)
class _Builder:
    """Collects the lines of a file, and checks that they agree where they give the same fact twice."""

    name: str
    headers: list[Header] = field(default_factory=list)
    begins: dict[int, TextLine] = field(default_factory=dict)
    rounds: dict[int, list[RoundLine]] = field(default_factory=dict)
    ends: dict[int, EndLine] = field(default_factory=dict)
    steps: list[StepLine] = field(default_factory=list)
    footer: Footer | None = None

    def add(self, number: int, line: Line) -> None:
        where = f"{self.name}, line {number}"
        if self.footer is not None:
            raise ForedraftError(f"{where}: nothing may follow the closing line")
        match line:
            case Header():
                if number > 1:
                    raise ForedraftError(f"{where}: a second header: one file holds one recording")
                self.headers.append(line)
            case TextLine():
                if line.text in self.begins:
                    raise ForedraftError(f"{where}: text {line.text} has already begun")
                self.begins[line.text], self.rounds[line.text] = line, []
            case StepLine():
                if line.step != len(self.steps):
                    raise ForedraftError(f"{where}: step {line.step}, but step {len(self.steps)} was expected")
                self.steps.append(line)
            case RoundLine():
                self._add_round(where, line)
            case EndLine():
                self._require_open(where, line.text)
                self.ends[line.text] = line
                self._check_end(where, line)
            case Footer():
                self.footer = line
                self._check_footer(where, line)

    def trace(self) -> Trace:
        texts = tuple(
            TextTrace(begin, tuple(self.rounds[text]), self.ends.get(text)) for text, begin in self.begins.items()
        )
        return Trace(self.headers[0], texts, tuple(self.steps), is_complete=self.footer is not None)

    def _add_round(self, where: str, line: RoundLine) -> None:
        self._require_open(where, line.text)
        if not self.steps or line.step != self.steps[-1].step:
            raise ForedraftError(f"{where}: a round of step {line.step} must follow that step's own line")
        rounds = self.rounds[line.text]
        expected = rounds[-1].at + len(rounds[-1].kept) if rounds else 0
        if line.at != expected:
            raise ForedraftError(f"{where}: text {line.text} has {expected} tokens, but this round begins at {line.at}")
        rounds.append(line)

    def _require_open(self, where: str, text: int) -> None:
        if text not in self.begins:
            raise ForedraftError(f"{where}: text {text} has not begun")
        if text in self.ends:
            raise ForedraftError(f"{where}: text {text} has already ended")

    def _check_end(self, where: str, line: EndLine) -> None:
        trace = TextTrace(self.begins[line.text], tuple(self.rounds[line.text]), line)
        if trace.token_ids != line.token_ids:
            raise ForedraftError(f"{where}: the rounds of text {line.text} do not produce its tokens")
        _compare(where, f"the rounds of text {line.text}", Counts.of(trace.stats), line.counts)

    def _check_footer(self, where: str, line: Footer) -> None:
        missing = next((text for text in self.begins if text not in self.ends), None)
        if missing is not None:
            raise ForedraftError(f"{where}: text {missing} has no end")
        if (line.num_texts, line.num_steps) != (len(self.begins), len(self.steps)):
            raise ForedraftError(
                f"{where}: it counts {line.num_texts} texts and {line.num_steps} steps, but there are "
                f"{len(self.begins)} and {len(self.steps)}"
            )
        _compare(where, "the rounds", Counts.of(self.trace().stats), line.counts)


def _compare(where: str, what: str, counted: Counts, stated: Counts) -> None:
    """Compares all counts except num_near_ties, which the rounds do not contain."""
    for name in Counts.model_fields:
        if name != "num_near_ties" and getattr(counted, name) != getattr(stated, name):
            raise ForedraftError(
                f"{where}: {name} is {getattr(stated, name)}, but {what} have {getattr(counted, name)}"
            )
