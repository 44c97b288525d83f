"""Tests by betting: bets are exactly fair if the claim is true, and find faults of the stated size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.certificate.betting import FALSE_ALARM, Bet, Bets
from foredraft.certificate.distribution import (
    EVERY_TOKEN,
    OF_STEPS,
    BetResult,
    Tokens,
    bonus,
    bonus_pairs,
    every_token,
    first_of_step,
)
from foredraft.certificate.surprise import centred_surprise
from foredraft.certificate.texts import Text
from foredraft.certificate.verification import (
    SortedRatios,
    other_residual,
    stands,
    temperature_score,
)
from foredraft.engine.sequence import Origin
from foredraft.sampling import Sampler, SamplingParams, TokenProbs


@st.composite
def laws(draw: st.DrawFn, count: int = 2) -> list[Tensor]:
    """Distributions over a few ids, some of which have probability 0."""
    size = draw(st.integers(2, 6))
    rows = []
    for _ in range(count):
        weights = draw(st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 5.0]), min_size=size, max_size=size))
        weights[draw(st.integers(0, size - 1))] = 1.0
        row = torch.tensor(weights, dtype=torch.float64)
        rows.append(row / row.sum())
    return rows


def outcomes(p: Tensor, q: Tensor, before: float = 0.7) -> dict[str, tuple[Tensor, Tensor]]:
    """By bet on a text: (g of every possible token, its probability). before: Tokens.cdf of the token before."""
    tokens = p.nonzero()[:, 0]
    case = Tokens.of(TokenProbs(p.expand(len(tokens), -1)), tokens)
    past = torch.full((len(tokens),), before, dtype=torch.float64)
    results: dict[str, BetResult] = every_token(case, past) | of_first(p, q, tokens) | bonus(case, past)
    return {name: (result.g, p[tokens]) for name, result in results.items()}


def of_first(p: Tensor, q: Tensor, tokens: Tensor) -> dict[str, BetResult]:
    """The bets on steps that begin with these tokens, each after the likeliest token."""
    count = len(tokens)
    both = torch.stack([p.argmax().expand(count), tokens], dim=1).flatten()
    begins = torch.tensor([True, False]).repeat(count)
    case = Tokens.of(TokenProbs(p.expand(2 * count, -1)), both)
    is_certain = torch.zeros(count, dtype=torch.bool)
    return first_of_step(case, begins, (~begins).nonzero()[:, 0], q.expand(count, -1), is_certain)


@given(laws(), st.floats(-1, 1))
def test_every_bet_on_a_text_is_fair(pair: list[Tensor], before: float) -> None:
    """Whatever the token before was, so that the bets on the noise are martingales too."""
    p, q = pair
    for name, (g, odds) in outcomes(p, q, before).items():
        assert abs(float((g * odds).sum())) < 1e-12, name


def test_bonus_tokens_are_paired_with_the_one_that_ended_the_previous_step() -> None:
    """Positions count over all texts. A recovered or plain token in between, or the end of a text, prevents a pair."""
    plain, accepted, recovered, bonus = Origin
    sampler = Sampler(SamplingParams(temperature=1.0), [0], torch.Generator())

    def text(*origins: Origin) -> Text:
        return Text([0, *range(len(origins))], 1, sampler, origins=origins)

    first = text(plain, accepted, bonus, accepted, accepted, bonus, bonus, recovered, bonus)
    second = text(bonus, accepted, bonus)
    assert bonus_pairs([first, second]) == ([5, 6, 11], [2, 5, 9])


@given(laws(3))
def test_the_expected_fortune_after_two_tokens_is_the_initial_one(three: list[Tensor]) -> None:
    """By enumeration: the second token's distribution depends on the first token, and so does the bet on it."""
    p, *seconds = three
    stakes = Bet("").stakes
    first = Tokens.of(TokenProbs(p.expand(len(p), -1)), torch.arange(len(p)))
    own = first.cdf()
    total = torch.zeros_like(stakes)
    for token in p.nonzero()[:, 0].tolist():
        law = seconds[token % 2]
        tokens = torch.arange(len(law))
        second = Tokens.of(TokenProbs(law.expand(len(law), -1)), tokens)
        g = second.cdf() * own[token]
        total += p[token] * (law[:, None] * (1 + stakes * g[:, None])).sum(0)
    torch.testing.assert_close(total, torch.ones_like(stakes), rtol=0, atol=1e-12)


@given(laws())
def test_every_bet_on_a_draw_is_fair_and_keeps_its_bounds(pair: list[Tensor]) -> None:
    p, q = pair
    tokens = p.nonzero()[:, 0]
    ratios, ones = SortedRatios(p, q), torch.ones(len(tokens), dtype=torch.float64)
    for g in (centred_surprise(p)[tokens], temperature_score(p, q)[tokens], stands(ratios, ratios.ratio[tokens], ones)):
        assert abs(float((g * p[tokens]).sum())) < 1e-12
        assert float(g.abs().max()) <= 1 + 1e-12


def test_the_score_of_another_temperature_is_its_derivative() -> None:
    """Compared with the output distributions at two temperatures close to the right one, by enumeration."""
    p, q = P.flip(0), Q

    def out(power: float) -> Tensor:
        named = q.pow(power)
        named = named / named.sum()
        stands = q * (p / named).clamp(max=1)
        residual = (p - named).clamp(min=0)
        return stands + (1 - stands.sum()) * residual / residual.sum()

    step = 1e-6
    slope = (out(1 + step) - out(1 - step)) / (2 * step)
    assert float(slope.abs().max()) > 0.01
    torch.testing.assert_close(temperature_score(p, q) * 8 * p, slope, rtol=0, atol=1e-6)


def test_the_summary_of_a_gross_fault_is_finite() -> None:
    """The fortune exceeds the largest float."""
    bets = Bets({"a": Bet("it is wrong")})
    bets.update("a", torch.full((5000,), 0.9, dtype=torch.float64))
    assert bets.log_evidence > 400
    assert "10^" in bets.summary
    assert bets.figures["log10_evidence"] == bets.log_evidence


@given(laws())
def test_every_bet_on_a_text_keeps_its_bounds(pair: list[Tensor]) -> None:
    for name, (g, _) in outcomes(*pair).items():
        high = (EVERY_TOKEN | OF_STEPS)[name].high
        assert -1 - 1e-12 <= float(g.min()) <= float(g.max()) <= high + 1e-12


@given(laws(), st.floats(0.01, 1.0), st.floats(1.0, 100.0))
def test_bets_on_residuals_are_fair_and_keep_their_bounds(pair: list[Tensor], scale: float, more: float) -> None:
    p, q = pair
    ratios = SortedRatios(p, q)
    tokens = p.nonzero()[:, 0]
    one, other = (torch.full((len(tokens),), s, dtype=torch.float64) for s in (scale, scale * more))
    g = other_residual(ratios, ratios.ratio[tokens], one, other)
    assert abs(float((g * p[tokens]).sum())) < 1e-9
    assert float(g.abs().max()) <= 1 + 1e-9
    assert float(ratios.residual(one)[0]) == pytest.approx(float((scale * p - q).clamp(min=0).sum()), abs=1e-12)


@given(laws())
def test_the_expected_fortune_is_the_initial_one_for_every_stake(pair: list[Tensor]) -> None:
    """For one token and every stake, the expected value of a unit is a unit."""
    for g, odds in outcomes(*pair).values():
        for stake in Bet("", max(1.0, float(g.max()))).stakes:
            assert float(((1 + stake * g) * odds).sum()) == pytest.approx(1.0)


def played(p: Tensor, true: Tensor, q: Tensor, num_tokens: int, seed: int) -> Bets:
    """Bets on tokens that are drawn from `true` while p is claimed."""
    tokens = torch.from_numpy(np.random.default_rng(seed).choice(len(p), num_tokens, p=true.numpy()))
    bets = Bets({"likeliest": Bet(""), "draft stands": Bet("")})
    for part in tokens.split(1000):
        case = Tokens.of(TokenProbs(p.expand(len(part), -1)), part)
        bets.update("likeliest", *every_token(case, torch.zeros(len(part), dtype=torch.float64))["likeliest"])
        bets.update("draft stands", *of_first(p, q, part)["draft stands"])
    return bets


P = torch.tensor([0.55, 0.25, 0.1, 0.07, 0.03], dtype=torch.float64)
Q = torch.tensor([0.2, 0.2, 0.3, 0.2, 0.1], dtype=torch.float64)


@pytest.mark.slow
def test_false_alarms_are_as_rare_as_promised() -> None:
    """By Ville's inequality evidence of k occurs with a probability of at most 1/k. In 1,000 tests of 2,000 tokens the margin allowed here
    is exceeded with a probability below 1e-6."""
    evidence = [played(P, P, Q, 2000, seed).log_evidence for seed in range(1000)]
    assert not any(log10 >= -math.log10(FALSE_ALARM) for log10 in evidence)
    assert sum(log10 >= 1.0 for log10 in evidence) <= 150


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bet", "wrong"), [("draft stands", Q), ("likeliest", torch.eye(5, dtype=torch.float64)[0])], ids=str
)
def test_the_smallest_share_stated_is_found(bet: str, wrong: Tensor) -> None:
    """With a probability of 0.99, so that more than 9 of 100 tests miss it with a probability of only 1e-6."""
    share = played(P, P, Q, 10_000, 0).smallest_share(bet)
    assert share is not None
    assert 0 < share < 0.5
    true = (1 - share) * P + share * wrong
    missed = sum(not played(P, true, Q, 10_000, seed).is_rejected for seed in range(100))
    assert missed <= 9


def test_fewer_tokens_only_find_larger_faults() -> None:
    shares = [played(P, P, Q, n, 0).smallest_share("draft stands") for n in (1000, 4000, 16_000)]
    assert all(share is not None for share in shares[1:])
    known = [1.0 if share is None else share for share in shares]
    assert known == sorted(known, reverse=True)


def test_a_token_of_probability_zero_rejects_at_once() -> None:
    bets = Bets({"likeliest": Bet("")})
    assert not bets.is_rejected
    bets.num_impossible = 1
    assert bets.is_rejected
    assert math.isinf(bets.log_evidence)


@settings(max_examples=30)
@given(st.floats(-1, 1), st.integers(1, 50))
def test_one_update_and_many_give_the_same_fortunes(value: float, count: int) -> None:
    g = torch.full((count,), value, dtype=torch.float64)
    once, turn = Bets({"a": Bet("")}), Bets({"a": Bet("")})
    once.update("a", g, g * 0)
    for x in g:
        turn.update("a", x[None], x[None] * 0)
    assert turn.accounts["a"].num_tokens == once.accounts["a"].num_tokens == count
    assert turn.log_evidence >= once.log_evidence - 1e-9
