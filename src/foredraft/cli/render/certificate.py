"""The result of `foredraft check`, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import JustifyMethod

    from foredraft.certificate import Certificate, CheckResult, ControlResult


def certificate_tables(certificate: Certificate) -> list[Table]:
    """The tests of the real verifier, and those of the broken ones."""
    tables = [_tests(certificate)]
    return [*tables, _controls(certificate.controls)] if certificate.controls else tables


def certificate_lines(certificate: Certificate) -> list[str]:
    """What applies to all tests together; the verdict comes last."""
    rows = "bit-exact" if certificate.row_exact else f"not bit-exact: ties up to {certificate.tie:.1e} are accepted"
    left_out = [f"skipped: {line}" for line in certificate.left_out]
    rejected = sum(control.rejected for control in certificate.controls)
    odds = f"false alarm at most {certificate.false_alarm:.0e}, " if certificate.false_alarm else ""
    reason = f": {certificate.reason}" if certificate.reason else ""
    return [
        f"drafts: {certificate.drafts}",
        f"rows: {rows}",
        *left_out,
        f"in all: {odds}{rejected} of {len(certificate.controls)} tested broken verifiers rejected, "
        f"{certificate.num_prompts} prompts, seed {certificate.seed}, {certificate.seconds:.0f} s",
        f"verdict: {certificate.verdict}{reason}",
    ]


def _tests(certificate: Certificate) -> Table:
    title = f"{certificate.method}, temperature {certificate.temperature:g}"
    table = _table({title: "left", "examined": "right", "found": "left", "odds": "left", "": "left"})
    for check in certificate.checks:
        table.add_row(f"{check.name}, {check.kind}", _looked_at(check), check.detail, check.odds, _mark(check.passed))
    return table


def _controls(controls: Iterable[ControlResult]) -> Table:
    table = _table({"broken on purpose": "left", "rejected by": "left", "after": "right", "power": "right"})
    for name, group in _by_name(controls).items():
        by = [f"{control.kind}: {control.by or 'nothing'}" for control in group]
        after = [f"{control.num_tokens:,} tokens" for control in group]
        table.add_row(f"{name}: {group[0].says}", "\n".join(by), "\n".join(after), "\n".join(map(_power, group)))
    return table


def _table(columns: dict[str, JustifyMethod]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for name, justify in columns.items():
        table.add_column(name, justify=justify, overflow="fold")
    return table


def _looked_at(check: CheckResult) -> str:
    what = "steps" if check.kind == "drawn" else "texts"
    return f"{check.num_texts:,} {what}\n{check.num_tokens:,} tokens\n{check.num_drafted:,} drafted"


def _mark(passed: bool) -> Text:
    return Text("passed", style="green") if passed else Text("FAILED", style="bold red")


def _power(control: ControlResult) -> str:
    if control.power is None:
        return "-"
    return "> 0.9999" if control.power > 0.9999 else f"{control.power:.4f}"


def _by_name(controls: Iterable[ControlResult]) -> dict[str, list[ControlResult]]:
    groups: dict[str, list[ControlResult]] = {}
    for control in controls:
        groups.setdefault(control.name, []).append(control)
    return groups
