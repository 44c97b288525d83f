"""The plots of a report, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from foredraft.bench.result import BenchResult

# distinguishable with colour blindness (Okabe and Ito); if there are more configurations, colours repeat with other markers
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vP*"
_DPI = 150
_POINTS = 400


def draw_plots(result: BenchResult, directory: Path) -> list[Path]:
    """Draw the plots. -> the files. A plot that would be empty (nothing to compare, or nothing drafted) is left out, and one that an
    earlier benchmark left in the directory is removed."""
    plots: dict[str, tuple[Callable[[Axes, BenchResult], None], bool]] = {
        "speedup": (_draw_speedup, len(result.names) > 1),
        "latency": (_draw_latency, any(result.figures(name).inter_token_latency for name in result.names)),
        "acceptance": (_draw_acceptance, any(result.figures(name).acceptance_by_position for name in result.names)),
    }
    drawn, is_used = [], (directory / "results.json").exists()
    for name, (draw, wanted) in plots.items():
        files = [directory / f"{name}.svg", directory / f"{name}.png"]
        if wanted:
            _draw(draw, result, files)
            drawn += files
        elif is_used:
            for file in files:
                file.unlink(missing_ok=True)
    return drawn


def _draw(draw: Callable[[Axes, BenchResult], None], result: BenchResult, files: list[Path]) -> None:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, result)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    for file in files:
        figure.savefig(file, dpi=_DPI, metadata={"Date": None} if file.suffix == ".svg" else None)


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index // len(_COLOURS) % len(_MARKERS)]}


def _draw_speedup(axes: Axes, result: BenchResult) -> None:
    """Each configuration's speedup over the baseline, per category, with its interval."""
    parts = [None, *result.categories] if len(result.categories) > 1 else [None]
    names = result.names[1:]
    for index, name in enumerate(names):
        ratios = [result.compare(name, part).speedup for part in parts]
        values = np.array([ratio.value for ratio in ratios])
        lows = [ratio.interval.low if ratio.interval else ratio.value for ratio in ratios]
        highs = [ratio.interval.high if ratio.interval else ratio.value for ratio in ratios]
        places = np.arange(len(parts)) + 0.6 * ((index + 0.5) / len(names) - 0.5)
        errors = np.maximum(0.0, [values - lows, np.array(highs) - values])
        axes.errorbar(values, places, xerr=errors, linestyle="", capsize=3, label=name, **_style(index + 1))
    axes.axvline(1.0, color=_style(0)["color"], linewidth=1, label=result.baseline)
    axes.set_yticks(range(len(parts)), [part or "all questions" for part in parts])
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second relative to {result.baseline}, with the bootstrap 95 % interval")


def _draw_latency(axes: Axes, result: BenchResult) -> None:
    """The distribution of the time between deliveries."""
    for index, name in enumerate(result.names):
        turns = [turn for run in result.runs_of(name) for answer in run.answers for turn in answer.turns]
        gaps = [1e3 * gap for turn in turns for gap in turn.gaps]
        if gaps:
            shares = np.linspace(0, 1, _POINTS)
            axes.plot(np.quantile(gaps, shares), shares, color=_style(index)["color"], label=name)
    for share in (0.5, 0.95):
        axes.axhline(share, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "25 %", "p50", "75 %", "p95"])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("inter-token latency: from one delivery to the next, ms (tokens of a step arrive together)")
    axes.set_ylabel("share of deliveries")


def _draw_acceptance(axes: Axes, result: BenchResult) -> None:
    """α by position in the draft."""
    longest = 1
    for index, name in enumerate(result.names):
        alphas = result.figures(name).acceptance_by_position
        if alphas:
            axes.plot(range(1, len(alphas) + 1), alphas, label=name, **_style(index))
            longest = max(longest, len(alphas))
    axes.set_xticks(range(1, longest + 1, -(-longest // 16)))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("conditional acceptance α")
