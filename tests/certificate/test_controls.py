"""Each broken verifier is rejected on the toy that it is made for, and the real one is not."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.certificate.betting import Bets
from foredraft.certificate.controls import CONTROLS, Control, controls_for
from foredraft.certificate.report import DRAWN, GREEDY, SAMPLED, SEEDED, CheckRun
from foredraft.certificate.verification import Draws, Pair
from foredraft.sampling import SamplingParams
from foredraft.verify import Verifier, verify
from tests.laws import random_laws

SMALL = {"late residual", "warmer q"}
"""Faults too small for these toys; test_certify.py tests them on the distributions of models."""
BY_DRAWS = [control for control in CONTROLS if DRAWN in control.kinds and control.name not in SMALL]
PARAMS: dict[str, dict[str, object]] = {
    "whole": {"temperature": 1.0},
    "cooler": {"temperature": 0.7},
    "truncated": {"temperature": 1.2, "top_p": 0.95},
    "rejection": {"temperature": 1.0, "verification": "rejection"},
}


def pairs() -> list[Pair]:
    p, q = random_laws(31, 1.5, vocab_size=12), random_laws(32, 1.5, vocab_size=12)
    return [Pair(p((i,)).log().float(), q((i,)).float()) for i in range(8)]


def bets_on(verifier: Verifier, params: dict[str, object], num_tokens: int) -> Bets:
    resolved = SamplingParams(**params).resolve({})  # type: ignore[arg-type]
    draws = Draws(pairs(), pairs(), resolved, 3, verifier, seed=0, num_wanted=num_tokens)
    while not draws.is_complete:
        draws.place()
    return draws.bets


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_the_real_verifier_is_not_rejected(params: dict[str, object]) -> None:
    assert not bets_on(verify, params, 100_000).is_rejected


def takes_long(control: str) -> bool:
    """Whether a fault takes a million tokens to detect; tests/testing/test_rules.py detects both at once, in the outcome law."""
    return control in ("uncapped scale", "token residual")


@pytest.mark.parametrize(
    ("control", "params"),
    [
        pytest.param(
            control, params, id=f"{control.name}-{params}", marks=[pytest.mark.slow] * takes_long(control.name)
        )
        for control in BY_DRAWS
        for params in ("whole", "cooler", "truncated")
    ],
)
def test_every_broken_draw_is_rejected(control: Control, params: str) -> None:
    assert bets_on(control.verifier, PARAMS[params], 1_200_000).is_rejected


def conditions(num_drafted: int, num_sampled: int, rule: str, length: int) -> tuple[CheckRun, SamplingParams]:
    """The record of a check of the real verifier, and the parameters."""
    params = SamplingParams(temperature=1.0, verification=rule, speculative_tokens=length).resolve({})
    return CheckRun([], num_drafted, num_sampled), params


def test_every_kind_has_a_control_even_without_drafts() -> None:
    for kind in (GREEDY, SEEDED, SAMPLED):
        assert controls_for(kind, *conditions(0, 0, "block", 4))[0]


def test_controls_are_chosen_where_they_can_be_detected() -> None:
    def names(kind: str, *seen: Any) -> set[str]:
        return {control.name for control in controls_for(kind, *conditions(*seen))[0]}

    assert "accept all" not in names(SAMPLED, 0, 0, "block", 4)
    assert "accept all" in names(SAMPLED, 9, 0, "block", 4)
    assert "no residual" not in names(SAMPLED, 9, 0, "block", 4)
    assert {"no residual", "first failure"} <= names(DRAWN, 9, 9, "block", 4)
    assert "first failure" not in names(DRAWN, 9, 9, "rejection", 4)
    assert "first failure" not in names(DRAWN, 9, 9, "block", 1)


@pytest.mark.parametrize("seen", [(0, 0, "block", 4), (9, 0, "block", 4), (9, 9, "rejection", 4), (9, 9, "block", 1)])
@pytest.mark.parametrize("kind", [GREEDY, SEEDED, SAMPLED, DRAWN])
def test_a_control_runs_or_is_reported_as_left_out(kind: str, seen: tuple[int, int, str, int]) -> None:
    run, left_out = controls_for(kind, *conditions(*seen))
    named = " ".join(left_out)
    assert all((control in run) != (control.name in named) for control in CONTROLS if kind in control.kinds)


def test_the_reason_for_leaving_out_is_named() -> None:
    (line,) = controls_for(DRAWN, *conditions(9, 9, "rejection", 4))[1]
    assert "first failure" in line
    assert line.endswith("verified by rejection")


def test_names_are_unique() -> None:
    assert len({control.name for control in CONTROLS}) == len(CONTROLS)
