"""What commands that measure have in common: the prompts, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.inputs import read_text

if TYPE_CHECKING:
    from foredraft.bench import Workload

WorkloadOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="In a .jsonl file an object per line with turns (as in Spec-Bench and MT-bench) or prompt, and category and "
        "question_id; in any other a prompt per line. Default: built-in prompts.",
    ),
]
NumPromptsOption = Annotated[
    int | None, typer.Option("--num-prompts", help="Only so many, the categories in turn. Default: all.")
]


def workload_from(file: Path | None, num_prompts: int | None) -> Workload:
    from foredraft.bench import Workload, built_in_workload

    if file is None:
        found = built_in_workload()
    elif file.suffix == ".jsonl":
        found = Workload.parse(read_text(file), file.name)
    else:
        found = Workload.of([line for line in read_text(file).split("\n") if line.strip()], file.name)
    return found if num_prompts is None else found.first(num_prompts)


@contextmanager
def shares(description: str) -> Iterator[Callable[[float], None]]:
    """A bar of a hundred steps that is told which share is done."""
    from foredraft.cli.render import progress_bar

    with progress_bar(description, 100) as advance:
        shown = 0

        def show(share: float) -> None:
            nonlocal shown
            while shown < round(100 * share):
                advance()
                shown += 1

        yield show
