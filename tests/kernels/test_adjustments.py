"""Penalties, biases and bans by the compiled kernels, compared bit by bit with those of the sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels import Chains, DrawSpec, Kernels, MarkovFactors
from foredraft.sampling import CheckpointRules, Sampler, SamplingParams
from foredraft.sampling.noise import stream_keys
from foredraft.sampling.rules import NO_CHECKPOINT_RULES

V = 40
TOKENS = st.lists(st.integers(0, V - 1), max_size=12)


def sampler_for(prompt: list[int], rules: CheckpointRules = NO_CHECKPOINT_RULES, **params: Any) -> Sampler:
    resolved = SamplingParams(**{"temperature": 0.0, "max_tokens": 50, **params}).resolve({})
    return Sampler(resolved, prompt, torch.Generator(), end_ids=(2, 3), bad_words=[(5,)], rules=rules)


@st.composite
def samplers(draw: st.DrawFn, prompt: list[int]) -> Sampler:
    params = {
        "repetition_penalty": draw(st.sampled_from([1.0, 1.1, 0.7, 2.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.3, -1.7])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.6, -0.1])),
        "logit_bias": draw(st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9), max_size=3)) or None,
        "min_tokens": draw(st.integers(0, 6)),
    }
    return sampler_for(prompt, CheckpointRules(((7,),), (4, 9), (2,)), **params)


def random_logits(num_rows: int, width: int = V, seed: int = 0) -> Tensor:
    return 4 * torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=12),
    output=TOKENS,
    drafted=TOKENS,
    seed=st.integers(0, 99),
)
def test_rows_have_the_bits_of_the_samplers(
    kernels: Kernels, data: st.DataObject, prompt: list[int], output: list[int], drafted: list[int], seed: int
) -> None:
    sampler, history = data.draw(samplers(prompt)), [*prompt, *output]
    logits = random_logits(len(drafted) + 1, seed=seed)
    expected = torch.stack([sampler.warp(row, history, drafted[:i]) for i, row in enumerate(logits.clone())])
    assert sampler.has_adjustments(history, len(drafted) + 1)
    adjustments = sampler.adjustments(history)
    assert adjustments is not None
    rows = list(range(len(logits)))
    kernels.adjust(logits, rows, [adjustments] * len(rows), [drafted[:i] for i in rows])
    assert torch.equal(logits, expected)


def test_only_the_given_rows_change_each_by_its_own_adjustments(kernels: Kernels) -> None:
    logits = random_logits(5)
    before = logits.clone()
    made = [sampler_for([1, 8], repetition_penalty=2.0), sampler_for([6], logit_bias={30: -3.0})]
    each = [adjustments for sampler in made if (adjustments := sampler.adjustments([1, 8])) is not None]
    kernels.adjust(logits, [3, 1], each, [[11], []])
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]])
    for row, sampler, drafted in ((3, made[0], [11]), (1, made[1], [])):
        assert torch.equal(logits[row], sampler.warp(before[row].clone(), [1, 8], drafted))


def test_what_has_no_adjustments() -> None:
    """Rows that depend on more than which tokens came before, and how often."""
    history = [1, 8, 6]
    assert sampler_for([1]).has_adjustments(history, 9)
    assert not sampler_for([1], allowed_token_ids=[4, 5]).has_adjustments(history, 1)
    assert not sampler_for([1], logits_processors=[lambda ids, logits: logits]).has_adjustments(history, 1)
    assert not sampler_for([1], CheckpointRules(((7, 8),))).has_adjustments(history, 1)
    last = sampler_for([1], CheckpointRules(last_ids=(2,)), max_tokens=5)
    assert [last.has_adjustments(history, count) for count in (1, 2, 3, 4)] == [True, True, False, False]
    resolved = SamplingParams(temperature=0.0).resolve({})
    assert Sampler(resolved, [1], torch.Generator()).adjustments(history) is None


@pytest.mark.parametrize("spec", [DrawSpec(), DrawSpec(2.0, keys=stream_keys(7, 0, 20, 4))], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_columns", [V, 24], ids=["full", "reduced"])
def test_tokens_of_a_chain_are_penalised_as_they_come(kernels: Kernels, num_columns: int, spec: DrawSpec) -> None:
    """The chain's second factor is zero, so that each row depends on earlier tokens through penalties alone. An unadjusted chain has no
    penalties and shares the call."""
    ids = None if num_columns == V else torch.randperm(V, generator=torch.Generator().manual_seed(1))[:num_columns]
    factors = MarkovFactors(torch.zeros(V, 16), kernels.pack(torch.zeros(num_columns, 16)), ids)
    history, sampler = [1, 8, 8, 6], sampler_for([1, 8], repetition_penalty=3.0, presence_penalty=2.0, min_tokens=4)
    logits = random_logits(1, num_columns, seed=3).repeat(8, 1)
    specs = [spec._replace(adjustments=sampler.adjustments(history)), spec]
    [adjusted, plain], _, _ = kernels.choose_chains(logits, factors, Chains([0, 4], [4, 4], [0, 0]), V, specs)
    for tokens, changes in ((adjusted, True), (plain, False)):
        for step, token in enumerate(tokens):
            row = torch.full((V,), -torch.inf)
            row[torch.arange(V) if ids is None else ids] = logits[0]
            row = sampler.warp(row, history, tokens[:step]) if changes else row
            assert kernels.choose(row[None], [spec._replace(keys=spec.keys[step : step + 1])]) == [token]
    assert len(set(adjusted)) > 1


def test_inconsistent_arguments_are_refused(kernels: Kernels) -> None:
    adjustments = sampler_for([1]).adjustments([1])
    assert adjustments is not None
    with pytest.raises(ValueError, match="logits must be contiguous float32"):
        kernels.adjust(random_logits(2).double(), [0], [adjustments], [[]])
    with pytest.raises(ValueError, match="rows must be from 0 to 1: got 0 to 2"):
        kernels.adjust(random_logits(2), [0, 2], [adjustments] * 2, [[], []])
