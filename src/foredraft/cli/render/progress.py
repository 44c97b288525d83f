"""Spinners and progress bars on standard error, if it is a terminal; otherwise nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
