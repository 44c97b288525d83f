"""--trace: recording what a command generates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.cli.inputs import require_writable
from foredraft.utils.folders import check_replaceable

if TYPE_CHECKING:
    from foredraft.llm import LLM


def check_trace(trace: Path | None) -> None:
    """Called before anything is loaded. Raises ForedraftError for a file that cannot be written, or is not a trace."""
    if trace is not None:
        from foredraft.trace.format import BEGINNING

        require_writable(trace)
        check_replaceable(trace, BEGINNING)


def recording(llm: LLM, trace: Path | None) -> AbstractContextManager[object]:
    """Record into the file of --trace, if it is given."""
    if trace is None:
        return nullcontext()
    from foredraft.trace import record

    return record(llm, trace)
