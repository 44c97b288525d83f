"""The tables of `foredraft bench` and `foredraft tune`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foredraft.cli.render.console import output_console, write_lines

if TYPE_CHECKING:
    from foredraft.bench import BenchResult
    from foredraft.tune import TuneResult


def print_bench(result: BenchResult) -> None:
    """A column for each configuration, in as many tables as the terminal's width requires."""
    from foredraft.bench.report import facts, summary_columns

    console = output_console()
    names, *columns = summary_columns(result)
    widest = max(len(cell) for column in columns for cell in column) + 3
    num_fit = max(1, (console.width - max(map(len, names))) // widest)
    for start in range(0, len(columns), num_fit):
        head, *rows = zip(names, *columns[start : start + num_fit], strict=True)
        console.print(table_of(head, rows, left=("",), no_wrap=True))
    write_lines(console, facts(result))


def print_tuning(result: TuneResult) -> None:
    from foredraft.tune.report import COLUMNS, sentences, table_rows

    console = output_console()
    console.print(table_of(COLUMNS, table_rows(result), left=("method",)))
    advice, *others = sentences(result)
    write_lines(console, (*others, advice))


def table_of(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], *, no_wrap: bool = False
) -> Table:
    """left: the columns that are left-aligned; the others hold numbers."""
    table = Table(box=SIMPLE_HEAD)
    for name in head:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    return table
