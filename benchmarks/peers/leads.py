"""foredraft compared with the fastest other program at the same number of bits: plain decoding, and with drafts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.drafters.embedded_pair_speed import interval
from benchmarks.peers.systems import PEERS, PLAIN

_OURS = "foredraft-"
_BITS = {peer.name: peer.bits for peer in PEERS}
_KINDS = ("plain", "drafting")
_COLUMNS = ("bits", "decoding", "foredraft", "the fastest other", "foredraft over it")


def leads(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """rows: of compare.py's report. -> one entry for each number of bits and kind of decoding that both sides have. The ratio
    is the median over requests, paired; above 1 foredraft is faster.
    """
    pairs = ((bits, kind) for bits in sorted(set(_BITS.values())) for kind in _KINDS)
    found = (_lead(bits, kind, [row for row in rows if _is_of(row, bits, kind)]) for bits, kind in pairs)
    return [lead for lead in found if lead is not None]


def _is_of(row: dict[str, Any], bits: int, kind: str) -> bool:
    return _BITS[row["system"]] == bits and (row["mode"] == PLAIN) == (kind == "plain")


def _lead(bits: int, kind: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    ours = _fastest([row for row in rows if row["system"].startswith(_OURS)])
    other = _fastest([row for row in rows if not row["system"].startswith(_OURS)])
    if ours is None or other is None:
        return None
    ratios = [theirs / mine for theirs, mine in zip(other["seconds"], ours["seconds"], strict=True)]
    return {
        "bits": bits,
        "kind": kind,
        "foredraft": _name(ours),
        "other": _name(other),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
    }


def _fastest(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return max(rows, key=lambda row: row["tokens_per_second"], default=None)


def _name(row: dict[str, Any]) -> str:
    gamma = f", γ = {row['gamma']}" if row["gamma"] else ""
    return row["system"] if row["mode"] == PLAIN else f"{row['system']} {row['mode']}{gamma}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown; empty if nothing can be compared."""
    lines = [
        f"| {lead['bits']} | {lead['kind']} | {lead['foredraft']} | {lead['other']} | {lead['ratio']:.2f} "
        f"({lead['interval'][0]:.2f} to {lead['interval'][1]:.2f}) |"
        for lead in leads(rows)
    ]
    return "\n".join([f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|", *lines]) if lines else ""
