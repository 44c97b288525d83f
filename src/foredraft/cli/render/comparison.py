"""The table that compares plain decoding with speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from foredraft.cli.render.units import milliseconds_text, number_text

if TYPE_CHECKING:
    from foredraft.tools.demo import Comparison, Side


def comparison_table(comparison: Comparison) -> Table:
    stats, plain, drafted = comparison.stats, comparison.plain, comparison.speculative
    table = Table(box=SIMPLE_HEAD, caption=_caption(comparison), caption_justify="left")
    table.add_column(f"{comparison.method}, γ = {comparison.speculative_tokens}", no_wrap=True)
    table.add_column("plain", justify="right", no_wrap=True)
    table.add_column("speculation", justify="right", no_wrap=True)
    for name, show in _SIDE_ROWS.items():
        table.add_row(name, show(plain), show(drafted))
    table.add_row("draft acceptance rate", "", number_text(stats.draft_acceptance_rate))
    table.add_row("conditional acceptance α", "", number_text(stats.conditional_acceptance))
    table.add_row("mean acceptance length τ", "", number_text(stats.mean_acceptance_length))
    table.add_row("τ = (1 − α^(γ+1)) / (1 − α)", "", number_text(comparison.formula_acceptance_length))
    table.add_row("speedup", "", f"{comparison.speedup:.2f}×")
    table.add_row("texts identical", "", _identical(comparison))
    return table


def _caption(comparison: Comparison) -> str:
    return (
        f"{comparison.num_tokens} tokens, {comparison.repeated_share:.0%} of them in repeated 8-grams; "
        f"medians of {comparison.num_runs} alternating runs"
    )


def _identical(comparison: Comparison) -> str:
    if comparison.identical is None:
        return "not promised without --seed"
    if comparison.identical:
        return "yes"
    return f"no, from token {comparison.first_difference}; {comparison.stats.num_near_ties} near ties"


_SIDE_ROWS: dict[str, Callable[[Side], str]] = {
    "tokens/s": lambda side: f"{side.tokens_per_second:.1f}",
    "inter-token latency": lambda side: milliseconds_text(side.inter_token_latency),
    "time to first token": lambda side: milliseconds_text(side.time_to_first_token),
}
