"""Traces of a run, round by round: recorded as JSON lines, read back, and shown as an HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foredraft.utils.lazy import attributes

if TYPE_CHECKING:
    from foredraft.trace.format import VERSION, Trace
    from foredraft.trace.reader import read_trace
    from foredraft.trace.recorder import Recorder, record
    from foredraft.trace.view import page_of, write_page

__all__ = ["VERSION", "Recorder", "Trace", "page_of", "read_trace", "record", "write_page"]

__getattr__ = attributes(
    __name__,
    {
        "format": ("VERSION", "Trace"),
        "reader": ("read_trace",),
        "recorder": ("Recorder", "record"),
        "view": ("page_of", "write_page"),
    },
)
