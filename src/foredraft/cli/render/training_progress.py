"""What a training run is doing, on standard error: a bar on a terminal, elsewhere plain lines, such as for the log of a batch job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.cli.render.console import error_console

if TYPE_CHECKING:
    from foredraft.train import StepRecord

_INTERVAL = 60.0
"""Seconds between the lines of a stage."""


class TrainingBar:
    """Shows a stage and how much of it is done, or steps with their loss and acceptance."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=1.0)

    def prepare(self, description: str) -> None:
        self.stage(description)

    def stage(self, description: str) -> None:
        self._bar.reset(self._task, description=description, total=1.0)

    def share(self, share: float) -> None:
        self._bar.update(self._task, completed=share)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, record: StepRecord) -> None:
        self._bar.update(self._task, completed=record.progress, description=_step_text(record))


class TrainingLines:
    """Prints a line when a stage begins, and then at most one per minute. clock: seconds."""

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print, self._clock = print_line, clock
        self._description = ""
        self._printed_at = clock()

    def prepare(self, description: str) -> None:
        """Print nothing: mistakes are found before the first line, and reported in a line of their own."""

    def stage(self, description: str) -> None:
        self._description = description
        self.note(description)

    def share(self, share: float) -> None:
        if self._is_due:
            self.note(f"{self._description}: {share:.0%}")

    def note(self, text: str) -> None:
        self._print(text)
        self._printed_at = self._clock()

    def step(self, record: StepRecord) -> None:
        if self._is_due:
            self.note(f"step {record.step + 1} ({record.progress:.0%}): {_step_text(record)}")

    @property
    def _is_due(self) -> bool:
        return self._clock() - self._printed_at >= _INTERVAL


@contextmanager
def training_progress() -> Iterator[TrainingBar | TrainingLines]:
    console = error_console()
    if not console.is_terminal:
        yield TrainingLines(lambda line: typer.echo(line, err=True))
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield TrainingBar(progress)


def _step_text(record: StepRecord) -> str:
    return f"loss {record.loss:.3f}  acceptance {record.acceptance:.3f}"
