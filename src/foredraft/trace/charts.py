"""The charts of a trace's page, as SVG: α by position, and a histogram of accepted draft tokens."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.style import context

from foredraft.engine.stats import SpeculationStats

# placeholder colours, which are replaced by variables of the style sheet: one drawing serves the light and the dark page
_INK, _MUTED, _LINE, _BAR, _BAR_TEXT = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _LINE: "--line", _BAR: "--accepted-line", _BAR_TEXT: "--ink"}
_STYLE = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "text.color": _INK}
_SIZE = (5.0, 2.7)  # inches, of 72 units in the drawing
_MAX_LABELS = 12


def alpha_chart(stats: SpeculationStats) -> str:
    """α by position: of the evaluated draft tokens at each position, the share that was accepted."""
    shares = stats.acceptance_by_position
    return _bars(
        shares, [f"{share:.2f}" for share in shares], first=1, top=1.0, x="position in the draft", y="α", name="alpha"
    )


def histogram_chart(stats: SpeculationStats) -> str:
    """In how many rounds with a draft 0, 1, 2, ... draft tokens were accepted."""
    counts = stats.acceptance_histogram
    return _bars(
        counts, [f"{count:,}" for count in counts], first=0, x="draft tokens accepted", y="rounds", name="histogram"
    )


def _bars(
    heights: Sequence[float], labels: Sequence[str], *, first: int, x: str, y: str, name: str, top: float | None = None
) -> str:
    positions = range(first, first + len(heights))
    with context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        bars = axes.bar(positions, heights, width=0.62, color=_BAR)
        if len(labels) <= _MAX_LABELS:
            axes.bar_label(bars, labels, padding=3, fontsize=9, color=_BAR_TEXT)
        axes.set_xlabel(x, color=_MUTED)
        axes.set_ylabel(y, color=_MUTED)
        axes.set_ylim(0, (top or max(heights, default=1)) * 1.12)
        _style_axes(axes, list(positions))
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue())


def _style_axes(axes: Axes, positions: list[int]) -> None:
    """Leave only the data and faint horizontal lines."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    axes.tick_params(colors=_MUTED, length=0)
    axes.locator_params(axis="y", nbins=5)
    if len(positions) <= _MAX_LABELS:
        axes.set_xticks(positions)


def _inline(svg: str) -> str:
    """The svg element alone, in the page's colours, sized by the style sheet. It is hidden from screen readers: the page describes it."""
    svg = svg[svg.index("<svg") :].strip()
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"font: ([^;\"]*?)'[^\"]*?sans-serif", r"font: \1sans-serif", svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
