"""Samplers: their specs, failed rows, and results that wait for a device."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.sampling import (
    Noise,
    Pending,
    Row,
    SamplingParams,
    SamplingSpec,
    StructuredOutputs,
    adjusted,
    choose,
    choose_with,
    draw_specs,
    pending_choice,
)
from tests.far import FarTensor, elsewhere
from tests.laws import sampler_for

VOCAB_SIZE = 30
PROMPT = [1, 2]

SPECS: list[tuple[dict[str, Any], SamplingSpec]] = [
    ({"temperature": 0.0}, SamplingSpec(0.0, noise=Noise.NONE)),
    ({"temperature": 0.0, "seed": 3}, SamplingSpec(0.0, seed=3, noise=Noise.NONE)),
    ({"temperature": 0.7}, SamplingSpec(0.7)),
    ({"top_k": 5, "min_p": 0.1}, SamplingSpec(truncation=(5, 1.0, 0.1))),
    ({"top_p": 0.9, "seed": 7}, SamplingSpec(truncation=(0, 0.9, 0.0), seed=7, noise=Noise.COUPLED)),
    ({"verification": "rejection", "top_k": 9}, SamplingSpec(truncation=(9, 1.0, 0.0))),
]


def random_logits(num_rows: int) -> Tensor:
    """In float64, so that results are the same on every machine."""
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def failing(prefix: list[int], logits: Tensor) -> Tensor:
    raise KeyError("boom")


# --- the specs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("params", "expected"), SPECS, ids=str)
def test_a_spec_describes_how_a_request_is_sampled(params: dict[str, Any], expected: SamplingSpec) -> None:
    spec = sampler_for(params).spec
    assert spec == expected
    assert [spec.is_greedy, spec.is_coupled, spec.draws].count(True) == 1
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 5}, {"seed": 5, "top_p": 0.8, "temperature": 1.4}])
@pytest.mark.parametrize("child", [0, 3])
def test_a_pickled_spec_chooses_as_the_sampler_does(params: dict[str, Any], child: int) -> None:
    logits = random_logits(6)
    sampler = sampler_for(params, prompt=PROMPT, child=child)
    ids = choose(logits, [Row(sampler, PROMPT, [9] * i) for i in range(6)]).ids
    spec = pickle.loads(pickle.dumps(sampler.spec))
    assert choose_with([spec.draw_spec(i) for i in range(6)], 0, logits)[0] == ids
    # one spec for all of them, as in a draft loop
    loop = spec.draw_spec(0, count=6)
    assert [choose_with([loop], i, logits[i : i + 1])[0][0] for i in range(6)] == ids


def test_children_of_one_request_have_different_noise() -> None:
    specs = [SamplingSpec.of(SamplingParams(seed=1, temperature=1.0).resolve({}), child) for child in range(3)]
    assert len({spec.noise_keys(0, 1)[0] for spec in specs}) == 3


def test_uniform_numbers_are_drawn_for_as_many_tokens_as_requested() -> None:
    drawing, greedy, seeded = sampler_for({"top_k": 3}), sampler_for({"temperature": 0.0}), sampler_for({"seed": 2})
    specs = draw_specs([Row(sampler, (0,)) for sampler in (drawing, greedy, seeded)], [2, 2, 3])
    assert [len(spec.uniforms) for spec in specs] == [2, 0, 0]
    assert list(specs[2].keys) == [Row(seeded, (0,), [7] * i).noise_key for i in range(3)]
    expected = torch.rand(2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert list(specs[0].uniforms) == expected.tolist()


def test_each_uniform_number_is_used_once_whoever_asks() -> None:
    """Samplers that share a generator take numbers in turn."""
    one, other = sampler_for({}), sampler_for({})
    other.generator = one.generator
    counts = [(one, 3), (other, 70), (one, 100), (one, 0), (other, 5), (one, 1)]
    taken = [sampler.uniforms(count) for sampler, count in counts]
    assert [len(numbers) for numbers in taken] == [count for _, count in counts]
    numbers = [number for some in taken for number in some]
    assert len(set(numbers)) == len(numbers)
    generated = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    assert set(numbers) <= set(generated)


def test_a_fresh_sampler_belongs_to_the_same_request() -> None:
    params = {"seed": 4, "repetition_penalty": 1.5}
    used = sampler_for(params, prompt=PROMPT, child=2, end_ids=[3], bad_words=[[5, 6]])
    adjusted(random_logits(1), [Row(used, PROMPT, [4, 4])])
    fresh = used.fresh(PROMPT)
    assert fresh.spec == used.spec
    assert (fresh.end_ids, fresh.bad_words) == (used.end_ids, used.bad_words)
    row_logits = [adjusted(random_logits(1), [Row(sampler, PROMPT, [7])]).logits for sampler in (used, fresh)]
    assert torch.equal(*row_logits)
    assert used.fresh(PROMPT, SamplingParams(temperature=0.0).resolve({})).spec.is_greedy


def test_structured_outputs_need_their_constraint() -> None:
    with pytest.raises(ForedraftError, match="must come with a constraint"):
        sampler_for({"structured_outputs": StructuredOutputs(choice=["yes", "no"])})


# --- rows that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_k": 4}], ids=str)
def test_a_failed_row_is_returned_and_does_not_affect_others(params: dict[str, Any]) -> None:
    logits = random_logits(3)
    good, bad = sampler_for(params), sampler_for({**params, "logits_processors": [failing]})
    expected = choose(logits, [Row(good, (0,))] * 3).ids
    for _ in range(2):
        choice = choose(logits, [Row(good, (0,)), Row(bad, (0,)), Row(good, (0,))])
        assert dict(choice.failed) == {1: "logits processor failing raised KeyError: 'boom'"}
        assert [choice.ids[0], choice.ids[2]] == [expected[0], expected[2]]
    assert not choose(logits, [Row(good, (0,))] * 3).failed


def test_the_first_error_of_a_row_is_returned() -> None:
    logits = torch.full((1, VOCAB_SIZE), torch.nan, dtype=torch.float64)
    choice = choose(logits, [Row(sampler_for({"logits_processors": [failing]}), (0,))])
    assert "boom" in choice.failed[0]


# --- results that wait --------------------------------------------------------------------------------------------


def test_joined_results_wait_once_and_keep_shapes_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = elsewhere(monkeypatch)
    tensors = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([0.25, 1e-300], dtype=torch.float64), torch.tensor([True])]
    with device:
        parts = [
            Pending([FarTensor(tensors[0])], list),
            Pending([FarTensor(tensors[1]), FarTensor(tensors[2])], list).then(lambda host: host[::-1]),
            Pending.of(["known"]),
        ]
        first, second, third = Pending.joined(parts).resolve()
    assert device.num_waits == 1
    assert torch.equal(first[0], tensors[0])
    assert torch.equal(second[1], tensors[1])
    assert torch.equal(second[0], tensors[2])
    assert [x.dtype for x in (first[0], second[1], second[0])] == [x.dtype for x in tensors]
    assert third == ["known"]


def test_a_pending_choice_resolves_to_the_choice() -> None:
    logits = random_logits(4)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 3}, {"temperature": 0.0}]
    rows = [Row(sampler_for(kind), (0,)) for kind in kinds]
    pending, choice = pending_choice(logits, rows, margins=True).resolve(), choose(logits, rows, margins=True)
    assert choice.margins is not None
    assert pending == choice
