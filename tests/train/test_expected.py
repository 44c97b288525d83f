"""The expected τ, compared with enumeration, with the verifier itself, and with the engine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from foredraft import LLM, ForedraftError, SamplingParams
from foredraft.model import EMBEDDED
from foredraft.train.evaluate import measured_tau
from foredraft.train.expected import Expectation, expect
from foredraft.train.text_acceptance import acceptance_on, draft_of
from foredraft.verify import Case, next_weights, rejection_law

probabilities = st.lists(st.floats(0.0, 1.0), min_size=0, max_size=7)


@pytest.mark.parametrize("wrong", [[0.9, 1.4], [-0.1], [math.nan]])
def test_only_probabilities_are_accepted(wrong: list[float]) -> None:
    with pytest.raises(ForedraftError, match="probabilities between 0 and 1"):
        expect(wrong, 3)


def rounds_by_enumeration(acceptance: Sequence[float], gamma: int) -> tuple[float, list[float], list[float]]:
    """Enumerate every outcome of every draft token, as the engine proceeds. -> steps, evaluated and accepted by position"""
    rounds, evaluated, accepted = 0.0, [0.0] * gamma, [0.0] * gamma
    for coins in itertools.product((False, True), repeat=len(acceptance)):
        weight = 1.0
        for coin, chance in zip(coins, acceptance, strict=True):
            weight *= chance if coin else 1 - chance
        at = 0
        while at < len(coins):
            rounds += weight
            for place in range(min(gamma, len(coins) - at - 1)):
                evaluated[place] += weight
                if not coins[at]:
                    break
                accepted[place] += weight
                at += 1
            at += 1  # the recovered or bonus token
    return rounds, evaluated, accepted


@given(probabilities, st.integers(1, 4))
def test_the_recursion_is_the_mean_over_all_outcomes(acceptance: list[float], gamma: int) -> None:
    found = expect(acceptance, gamma)
    rounds, evaluated, accepted = rounds_by_enumeration(acceptance, gamma)
    assert found.num_tokens == len(acceptance)
    assert found.num_rounds == pytest.approx(rounds, abs=1e-12)
    assert found.evaluated.tolist() == pytest.approx(evaluated, abs=1e-12)
    assert found.accepted.tolist() == pytest.approx(accepted, abs=1e-12)


@given(probabilities.filter(bool), st.integers(1, 4))
def test_steps_and_accepted_tokens_add_up_to_the_text(acceptance: list[float], gamma: int) -> None:
    """A step gives the tokens that it accepts and one of the target's."""
    found = expect(acceptance, gamma)
    assert found.num_rounds + found.accepted.sum() == pytest.approx(len(acceptance))


def test_acceptance_rates_of_0_and_1() -> None:
    assert expect([0.0] * 12, 3).tau == pytest.approx(1.0)
    assert expect([1.0] * 12, 3).tau == pytest.approx(4.0)
    assert (expect([0.5] * 4, 2) + Expectation.zero(2)).num_rounds == expect([0.5] * 4, 2).num_rounds


def test_the_tau_of_long_texts_approaches_the_papers_formula() -> None:
    """τ = (1 - α^(γ+1)) / (1 - α) of arXiv:2211.17192, if every token has the same acceptance rate."""
    assert expect([0.8] * 5000, 4).tau == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=1e-3)


VOCAB, GAMMA, TEXT = 3, 2, 5


def toy_laws(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q [V, V], the distributions of the next token by the one before."""
    noise = torch.Generator().manual_seed(seed)
    p, q = (torch.softmax(2 * torch.randn(VOCAB, VOCAB, generator=noise, dtype=torch.float64), -1) for _ in range(2))
    return p, q


def rounds_of_the_verifier(p: torch.Tensor, q: torch.Tensor) -> float:
    """The expected number of steps, over every draft and every verdict of the production rule."""

    @cache
    def rounds(last: int, left: int) -> float:
        if left == 0:
            return 0.0
        depth = min(GAMMA, left - 1)
        found = 1.0
        for draft in itertools.product(range(VOCAB), repeat=depth):
            befores = [last, *draft]
            chance = math.prod(float(q[b, token]) for b, token in zip(befores, draft, strict=False))
            case = Case(
                p[befores][None],
                q[befores[:-1]][None],
                torch.stack([p[b, t] for b, t in zip(befores, draft, strict=False)])[None] if depth else p[:1, :0],
                torch.stack([q[b, t] for b, t in zip(befores, draft, strict=False)])[None] if depth else p[:1, :0],
                torch.tensor([depth]),
            )
            law = rejection_law(case)
            for stop in range(depth + 1):
                weights = next_weights(case, law, torch.tensor([stop]))[0]
                for token, weight in enumerate((weights / weights.sum()).tolist()):
                    found += chance * float(law.stop[0, stop]) * weight * rounds(token, left - stop - 1)
        return found

    return rounds(0, TEXT)


@pytest.mark.parametrize("seed", range(4))
def test_the_mean_over_the_targets_texts_is_that_of_the_verifier(seed: int) -> None:
    """All texts of a toy target with their probabilities, compared with steps of the production rule; nothing is drawn."""
    p, q = toy_laws(seed)
    mean = 0.0
    for text in itertools.product(range(VOCAB), repeat=TEXT):
        befores = [0, *text[:-1]]
        chance = math.prod(float(p[b, t]) for b, t in zip(befores, text, strict=True))
        stands = [min(1.0, float(q[b, t] / p[b, t])) for b, t in zip(befores, text, strict=True)]
        mean += chance * expect(stands, GAMMA).num_rounds
    assert mean == pytest.approx(rounds_of_the_verifier(p, q), abs=1e-12)


def test_each_position_has_its_own_acceptance_rate() -> None:
    """In two steps: the first token is the target's own, then tokens 1 and 2 are drafted, at positions 1 and 2."""
    found = expect([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0]], 2, num_undrafted=1)
    assert found.num_rounds == pytest.approx(1 + 1 + 0.5)
    assert found.accepted.tolist() == pytest.approx([1.0, 0.5])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(EMBEDDED / "target", EMBEDDED / "draft", dtype="float32", speculative_tokens=3, num_threads=1)


PROMPTS = ("def add(a, b):", "Once upon a time there was a", "class Node:\n    def __init__(self", "The dog and the")


def test_the_steps_of_greedy_text_are_predicted_exactly(llm: LLM) -> None:
    """Nothing is drawn, so predictions are exact except for near ties."""
    prompts = [llm.text_tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    total = Expectation.zero(3)
    for prompt, output in zip(prompts, llm.with_drafter("none").generate(prompts, params), strict=True):
        of_tokens, _ = acceptance_on(
            llm.target, draft_of(llm), [*prompt, *output.outputs[0].token_ids], 0.0, first=len(prompt)
        )
        total += expect(of_tokens.numpy(), 3)
    assert measured_tau(llm, prompts, params, 3) == pytest.approx(total.tau, rel=0.03)


def test_acceptance_is_that_of_the_warped_distributions(llm: LLM) -> None:
    ids = llm.text_tokenizer("def add(a, b):\n    return a + b")["input_ids"]
    with torch.no_grad():
        p, q = (
            torch.softmax(
                AutoModelForCausalLM.from_pretrained(EMBEDDED / name, dtype=torch.float32)(torch.tensor([ids])).logits[
                    0
                ]
                / 0.7,
                -1,
            )[:-1]
            for name in ("target", "draft")
        )
    of_tokens, of_draws = (places[0] for places in acceptance_on(llm.target, draft_of(llm), ids, 0.7))
    after = torch.tensor(ids[1:])[:, None]
    assert of_draws.tolist() == pytest.approx(torch.minimum(p, q).sum(-1).tolist(), abs=1e-4)
    assert of_tokens.tolist() == pytest.approx(
        (q.gather(1, after) / p.gather(1, after)).clamp(max=1)[:, 0].tolist(), rel=1e-3
    )
