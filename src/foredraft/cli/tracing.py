"""Recording what a command writes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli.inputs import require_place

if TYPE_CHECKING:
    from foredraft.llm import LLM


def check_trace(trace: Path | None) -> None:
    """Before anything is loaded. Raises ForedraftError for a file that cannot be written."""
    if trace is not None:
        require_place(trace)


def recorded(llm: LLM, trace: Path | None) -> AbstractContextManager[object]:
    """Records into the file that --trace names, if it names one."""
    if trace is None:
        return nullcontext()
    from foredraft.trace import record

    return record(llm, trace)
