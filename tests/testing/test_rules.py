"""The contract of verification rules: ours keep it, and broken ones are detected with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foredraft.testing import RuleContract, check_rule
from foredraft.verify import RULES, Case, OutcomeLaw, Rule, block_law, rejection_law
from foredraft.verify.mutations import stops_at_first_failure, token_residual, uncapped_scale


@pytest.mark.parametrize("name", sorted(RULES))
class TestRules(RuleContract):
    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self._name = name

    def rule(self, case: Case) -> OutcomeLaw:
        return RULES[self._name](case)


def never_accepts(case: Case) -> OutcomeLaw:
    """Lossless but useless: nothing is accepted, and the next token is drawn from p."""
    stop = torch.zeros_like(case.p[..., 0])
    stop[:, 0] = 1
    return OutcomeLaw(stop, torch.zeros_like(stop))


def accepts_all(case: Case) -> OutcomeLaw:
    stop = torch.nn.functional.one_hot(case.lens, case.p.shape[1]).to(case.p.dtype)
    return OutcomeLaw(stop, torch.ones_like(stop))


def changed(change: Callable[[OutcomeLaw, Case], OutcomeLaw]) -> Rule:
    return lambda case: change(rejection_law(case), case)


def negative(case: Case) -> OutcomeLaw:
    law = rejection_law(case)
    beyond = torch.arange(case.p.shape[1])[None] > case.lens[:, None]
    return OutcomeLaw((2 * law.stop - 0.5).masked_fill(beyond, 0), law.scale)


def writes(case: Case) -> OutcomeLaw:
    law = rejection_law(case)
    case.p_draft[:] = 0.5
    return law


def by_chance(case: Case) -> OutcomeLaw:
    return (rejection_law, block_law)[int(torch.rand(()) < 0.5)](case)


def by_its_batch(case: Case) -> OutcomeLaw:
    return never_accepts(case) if len(case.lens) > 3 else rejection_law(case)


def looks_beyond(case: Case) -> OutcomeLaw:
    return never_accepts(case) if float(case.q_draft.max()) > 1 else rejection_law(case)


BROKEN: dict[str, tuple[Rule, str]] = {
    "accepts all": (accepts_all, "the target generates it with"),
    "stops at the first failure": (stops_at_first_failure, "the target generates it with"),
    "residual of tokens": (token_residual, "the target generates it with"),
    "scale": (uncapped_scale, "the target generates it with"),
    "no law": (changed(lambda law, _: OutcomeLaw(law.stop / 2, law.scale)), "differs from 1 by 5.0e-01"),
    "negative": (negative, "a stop has probability -"),
    "shape": (changed(lambda law, _: OutcomeLaw(law.stop, law.scale[:, 1:])), r"scale must be \[B, K \+ 1\]"),
    "not finite": (
        changed(lambda law, _: OutcomeLaw(law.stop, law.scale / 0)),
        "scale contains numbers that are not finite",
    ),
    "writes": (writes, "modifies the case"),
    "by chance": (by_chance, "two different answers for one case"),
    "by its batch": (by_its_batch, "depending on the batch that it is in"),
    "beyond": (looks_beyond, "beyond a draft's length"),
}


def test_an_own_rule_passes() -> None:
    check_rule(never_accepts)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named_with_what_is_wrong(name: str) -> None:
    rule, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        check_rule(rule)


def test_a_rule_that_raises_is_named_with_its_error_and_place() -> None:
    def mine(case: Case) -> OutcomeLaw:
        raise ValueError("no such thing\nat all")

    place = rf"{Path(__file__).name}:{mine.__code__.co_firstlineno + 1}"
    with pytest.raises(AssertionError, match=r"mine breaks its contract(.|\n)*ValueError: no such thing") as caught:
        check_rule(mine)
    title, *clauses = str(caught.value).splitlines()
    assert f"in {len(clauses)} of" in title
    assert all(clause.startswith("- ") for clause in clauses)
    assert all(clause.endswith(f": ValueError: no such thing (at {place})") for clause in clauses)


def test_a_rule_that_returns_nothing_is_told_what_to_return() -> None:
    with pytest.raises(AssertionError) as caught:
        check_rule(lambda case: None)  # type: ignore[arg-type,return-value]
    _, *clauses = str(caught.value).splitlines()
    assert len(clauses) == 7
    assert all(clause.endswith(": the rule must return an OutcomeLaw, not NoneType") for clause in clauses)
