"""Reports of the benchmarks of heads: speed ratios of systems on the same prompts, one table for each kind of text and sampling."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.common.paths import RESULTS
from benchmarks.common.reports import listed, save
from benchmarks.drafters.embedded_pair_speed import System, interval, machine

Ratio = dict[str, Any]
Rows = list[dict[str, Any]]


def sampling_title(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def over(one: System, reference: System) -> Ratio:
    """How many times as fast as the reference, paired by prompt: the median, and its bootstrapped interval."""
    ratios = [a / b for a, b in zip(reference.seconds, one.seconds, strict=True)]
    return {"median": statistics.median(ratios), "interval": interval(ratios)}


def table(rows: Rows, references: Sequence[str], ratios_of: Callable[[dict[str, Any]], Iterable[Ratio | None]]) -> str:
    """references: the systems that the ratios of a row compare with. ratios_of: a row -> one ratio per reference, or None for no ratio."""
    columns = ["system", "tokens/s", *(f"over {name}" for name in references), "τ"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        ratios = [
            "" if ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(ratio["median"], *ratio["interval"])
            for ratio in ratios_of(row)
        ]
        tau = "" if row["tau"] is None else f"{row['tau']:.2f}"
        lines.append(f"| {row['system']} | {row['tokens_per_second']:.0f} | {' | '.join(ratios)} | {tau} |")
    return "\n".join(lines)


def report(sections: Iterable[tuple[str, Rows]], to_table: Callable[[Rows], str], args: argparse.Namespace) -> None:
    """Print each section as soon as it is measured, and save all of them if args.save is a name. sections: titles and rows."""
    found: dict[str, Any] = {"machine": machine(), "quantization": args.quantization, "max_tokens": args.max_tokens}
    parts = []
    for title, rows in sections:
        found[title] = rows
        parts.append(f"**{title}**\n\n{to_table(rows)}")
        print(parts[-1], flush=True)
    parts.append(listed(found["machine"]))
    if args.save is not None:
        save(found, "\n\n".join(parts) + "\n", RESULTS, args.save)
