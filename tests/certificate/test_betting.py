"""The laws of a test by betting: fair under the claim, exactly; and able to find what it says it finds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.certificate.betting import FALSE_ALARM, Bet, Bets
from foredraft.certificate.distribution import _every_token, _first_of_step, _Outcome, _Tokens
from foredraft.certificate.draws import _against, _Ladder
from foredraft.sampling import Laws

POWER = 0.99


@st.composite
def laws(draw: st.DrawFn, count: int = 2) -> list[Tensor]:
    """Laws over a few ids, some of which are impossible."""
    size = draw(st.integers(2, 6))
    found = []
    for _ in range(count):
        weights = draw(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0]), min_size=size, max_size=size))
        weights[draw(st.integers(0, size - 1))] = 1.0
        row = torch.tensor(weights, dtype=torch.float64)
        found.append(row / row.sum())
    return found


def outcomes(p: Tensor, q: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Bet -> (g of every possible token, its probability), for the bets of texts."""
    tokens = p.nonzero()[:, 0]
    case = _Tokens.of(Laws(p.expand(len(tokens), -1)), tokens)
    found: dict[str, _Outcome] = _every_token(case) | _first_of_step(case, q.expand(len(tokens), -1))
    return {name: (outcome.g, p[tokens]) for name, outcome in found.items()}


@given(laws())
def test_every_bet_on_a_text_is_fair(pair: list[Tensor]) -> None:
    p, q = pair
    for name, (g, odds) in outcomes(p, q).items():
        assert abs(float((g * odds).sum())) < 1e-12, name


@given(laws())
def test_every_bet_on_a_text_keeps_its_bounds(pair: list[Tensor]) -> None:
    bets = Bets({"first": Bet("", -1.0, 4.0)}).bets
    for name, (g, _) in outcomes(*pair).items():
        high = bets["first"].high if name == "draft's law" else 1.0
        assert -1 - 1e-12 <= float(g.min()) <= float(g.max()) <= high + 1e-12


@given(laws(), st.floats(0.01, 1.0), st.floats(1.0, 100.0))
def test_bets_on_residuals_are_fair_and_keep_their_bounds(pair: list[Tensor], scale: float, more: float) -> None:
    p, q = pair
    ladder = _Ladder.of(p, q)
    tokens = p.nonzero()[:, 0]
    one, other = (torch.full((len(tokens),), s, dtype=torch.float64) for s in (scale, scale * more))
    g = _against(ladder, ladder.ratio[tokens], one, other)
    assert abs(float((g * p[tokens]).sum())) < 1e-9
    assert float(g.abs().max()) <= 1 + 1e-9
    assert float(ladder.residual(one)[0]) == pytest.approx(float((scale * p - q).clamp(min=0).sum()), abs=1e-12)


@given(laws())
def test_the_expected_fortune_is_the_first_one_whatever_is_staked(pair: list[Tensor]) -> None:
    """One token, every stake: the mean of what a unit becomes is a unit."""
    for g, odds in outcomes(*pair).values():
        for stake in Bet("", -1.0, max(1.0, float(g.max()))).stakes:
            assert float(((1 + stake * g) * odds).sum()) == pytest.approx(1.0)


def played(p: Tensor, true: Tensor, q: Tensor, num_tokens: int, seed: int) -> Bets:
    """Bets on tokens drawn from `true` where p was claimed."""
    tokens = torch.from_numpy(np.random.default_rng(seed).choice(len(p), num_tokens, p=true.numpy()))
    bets = Bets({"likeliest": Bet(""), "draft stands": Bet("")})
    for part in tokens.split(1000):
        case = _Tokens.of(Laws(p.expand(len(part), -1)), part)
        bets.settle("likeliest", *_every_token(case)["likeliest"])
        bets.settle("draft stands", *_first_of_step(case, q.expand(len(part), -1))["draft stands"])
    return bets


P = torch.tensor([0.55, 0.25, 0.1, 0.07, 0.03], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.3, 0.2, 0.1], dtype=torch.float64)


def test_false_alarms_are_as_rare_as_promised() -> None:
    """In 1,000 tests of 2,000 tokens odds of 1/k come at most about every k-th time (Ville): to be wrong about that by the
    margin allowed here has odds below 1e-6."""
    evidence = [played(P, P, Q, 2000, seed).log_evidence for seed in range(1000)]
    assert not any(one >= -math.log10(FALSE_ALARM) for one in evidence)
    assert sum(one >= 1.0 for one in evidence) <= 150


@pytest.mark.parametrize(
    ("bet", "wrong"), [("draft stands", Q), ("likeliest", torch.eye(5, dtype=torch.float64)[0])], ids=str
)
def test_the_smallest_share_stated_is_found(bet: str, wrong: Tensor) -> None:
    """With odds of 0.99: of 100 tests more than 9 may miss it with odds of 1e-6 only."""
    share = played(P, P, Q, 10_000, 0).smallest_share(bet)
    assert share is not None
    assert 0 < share < 0.5
    true = (1 - share) * P + share * wrong
    missed = sum(not played(P, true, Q, 10_000, seed).is_rejected for seed in range(100))
    assert missed <= 9


def test_fewer_tokens_are_said_to_find_less() -> None:
    shares = [played(P, P, Q, n, 0).smallest_share("draft stands") for n in (1000, 4000, 16_000)]
    assert all(share is not None for share in shares[1:])
    known = [1.0 if share is None else share for share in shares]
    assert known == sorted(known, reverse=True)


def test_a_token_of_probability_zero_ends_it() -> None:
    bets = Bets({"likeliest": Bet("")})
    assert not bets.is_rejected
    bets.num_impossible = 1
    assert bets.is_rejected
    assert math.isinf(bets.log_evidence)


@settings(max_examples=30)
@given(st.floats(-1, 1), st.integers(1, 50))
def test_settling_at_once_and_in_turn_gives_the_same_fortunes(value: float, count: int) -> None:
    g = torch.full((count,), value, dtype=torch.float64)
    once, turn = Bets({"a": Bet("")}), Bets({"a": Bet("")})
    once.settle("a", g, g * 0)
    for one in g:
        turn.settle("a", one[None], one[None] * 0)
    assert turn.num_tokens("a") == once.num_tokens("a") == count
    assert turn.log_evidence >= once.log_evidence - 1e-9
