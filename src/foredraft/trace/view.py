"""Renders a trace as one self-contained HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from markupsafe import Markup

from foredraft.engine.stats import SpeculationStats
from foredraft.errors import ForedraftError
from foredraft.trace.assets import asset, page_template
from foredraft.trace.charts import alpha_chart, histogram_chart
from foredraft.trace.format import TextTrace, Trace
from foredraft.trace.three_js import three_js
from foredraft.utils.folders import check_replaceable

_SCRIPTS = (  # in the order of their dependencies
    "data.js", "token.js", "tip.js", "text.js", "timeline.js", "replay.js", "rounds.js", "table.js", "player.js", "main.js",
)  # fmt: skip


def write_page(trace: Trace, path: str | PathLike[str]) -> Path:
    """Write the page and return its path. Raises ForedraftError if it cannot be written, and if the file exists and is not a page."""
    page, path = page_of(trace), Path(path)
    check_replaceable(path, b"<!doctype html>")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def page_of(trace: Trace) -> str:
    """A self-contained page. Raises ForedraftError for a trace without any text."""
    if not trace.texts:
        raise ForedraftError("this trace has no text: nothing was generated while it was recorded")
    stats = trace.stats
    return page_template("foredraft.trace", "viewer").render(
        style=Markup(asset("style.css")),
        library=Markup(three_js()),
        scripts=[Markup(asset(name)) for name in _SCRIPTS],
        data=Markup(_script_json(_data(trace))),
        header=trace.header,
        stats=stats,
        num_texts=len(trace.texts),
        alpha=Markup(alpha_chart(stats)) if stats.num_spec_steps else None,
        histogram=Markup(histogram_chart(stats)) if stats.num_spec_steps else None,
        is_complete=trace.is_complete,
    )


def _data(trace: Trace) -> dict[str, Any]:
    return {
        "texts": [_text(text) for text in trace.texts],
        "steps": [step.model_dump(exclude={"type"}) for step in trace.steps],
        "counts": _counts(trace.stats),
    }


def _text(text: TextTrace) -> dict[str, Any]:
    return {
        "prompt": text.begin.prompt,
        "numPromptIds": len(text.begin.prompt_ids),
        "child": text.begin.child,
        "params": text.begin.params,
        "finishReason": text.end.finish_reason if text.end else None,
        "error": text.end.error if text.end else None,
        "rounds": [line.model_dump(exclude={"type", "text"}) for line in text.rounds],
    }


def _counts(stats: SpeculationStats) -> dict[str, Any]:
    counts = asdict(stats)
    del counts["num_near_ties"]  # the rounds do not contain it
    return counts


def _script_json(data: object) -> str:
    """JSON for a script element, escaped so that no text in it can end the script."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
