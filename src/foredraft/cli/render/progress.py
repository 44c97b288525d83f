"""Spinners and progress bars on standard error, if it is a terminal; otherwise nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from foredraft.cli.render.console import error_console


@contextmanager
def spinner(description: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being done now, after the description."""
    console = error_console()
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(description) as status:
        yield lambda now: status.update(f"{description}: {now}")


@contextmanager
def count_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many of `total` are done."""
    console = error_console()
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda num_done: progress.update(task, completed=num_done)


@contextmanager
def share_bar(description: str) -> Iterator[Callable[[float], None]]:
    """Yields a function that takes the share that is done, 0 to 1."""
    with count_bar(description, 100) as show:
        yield lambda share: show(round(100 * share))


class TrainingBar:
    """Shows what a training run is doing: a stage and how much of it is done, or steps with their loss and acceptance."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=1.0)

    def stage(self, description: str) -> None:
        self._bar.reset(self._task, description=description, total=1.0)

    def share(self, share: float) -> None:
        self._bar.update(self._task, completed=share)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, share: float, loss: float, acceptance: float) -> None:
        description = f"loss {loss:.3f}  acceptance {acceptance:.3f}"
        self._bar.update(self._task, completed=share, description=description)


@contextmanager
def training_bar() -> Iterator[TrainingBar]:
    console = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield TrainingBar(progress)
