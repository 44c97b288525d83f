"""What a test by betting found and what its odds are, each in one line."""

from __future__ import annotations

import math
from typing import Any

from foredraft.certificate.betting import FALSE_ALARM, Bets


def bets_line(bets: Bets) -> str:
    if bets.num_impossible:
        return f"{bets.num_impossible} tokens have probability 0 under the law that they are said to have"
    best = bets.bets[bets.best].says
    won = f"the best bet against the claim won {_times(bets.log_evidence)} to 1, and {1 / FALSE_ALARM:,.0f} rejects"
    return f"{best}: {won}" if bets.is_rejected else won


def bets_odds(share: float | None, likeliest: float | None) -> str:
    found = []
    if share is not None:
        found.append(f"draft tokens that stand unverified in {share:.1%} of steps")
    if likeliest is not None:
        found.append(f"the likeliest token in place of a drawn one in {likeliest:.1%}")
    seen = "; found with odds 0.99: " + ", or ".join(found) if found else ""
    return f"false alarm at most {FALSE_ALARM:.0e}{seen}"


def finite(value: float) -> float | None:
    """For JSON, which knows no infinity."""
    return value if math.isfinite(value) else None


def _times(log10: float) -> str:
    """A power of ten, of which a gross fault gives more than a float holds."""
    return f"{10**log10:,.1f}" if log10 < 9 else f"10^{log10:,.0f}"


def bets_figures(bets: Bets) -> dict[str, Any]:
    return {
        "log10_evidence": finite(bets.log_evidence),
        "log10_limit": -math.log10(FALSE_ALARM),
        "num_impossible": bets.num_impossible,
    }
