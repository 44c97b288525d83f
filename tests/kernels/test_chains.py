"""Chains whose rows are corrected by the token before, compared with single steps. Factors are small integers, so sums are exact."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from foredraft.kernels import Chains, DrawSpec, Kernels, MarkovFactors
from foredraft.sampling.noise import stream_keys

RANK = 24
LENS = (4, 1, 7, 2)
BEFORE = (3, 0, 11, 5)


class Case(NamedTuple):
    """second: [D, rank], unpacked. logits: those of all chains, separated by unrelated rows."""

    first: Tensor
    second: Tensor
    logits: Tensor
    chains: Chains
    target_ids: Tensor | None

    def factors(self, kernels: Kernels) -> MarkovFactors:
        return MarkovFactors(self.first, kernels.pack(self.second), self.target_ids)

    def row(self, row: int, previous: int) -> Tensor:
        """[1, V], the corrected logits of one step, by ids of the target."""
        logits = self.logits[row] + self.second @ self.first[previous]
        if self.target_ids is None:
            return logits[None]
        return torch.full((1, len(self.first)), -torch.inf).index_copy(1, self.target_ids, logits[None])


def case(num_columns: int, num_ids: int) -> Case:
    noise = torch.Generator().manual_seed(num_columns)
    first = torch.randint(-3, 4, (num_ids, RANK), generator=noise).float()
    second = torch.randint(-3, 4, (num_columns, RANK), generator=noise).float()
    starts = [1, *accumulate(length + 1 for length in LENS)][: len(LENS)]
    starts = [start + (place > 0) for place, start in enumerate(starts)]
    logits = torch.randn(starts[-1] + LENS[-1], num_columns, generator=noise).mul(512).round() / 64
    target_ids = None
    if num_columns < num_ids:
        target_ids = torch.randperm(num_ids, generator=noise)[:num_columns].sort().values
    return Case(first, second, logits, Chains(starts, LENS, BEFORE), target_ids)


CASES = {"full": case(200, 200), "padded": case(256, 200), "reduced": case(90, 200)}

SPECS = [
    DrawSpec(),
    DrawSpec(0.8, (5, 1.0, 0.0), uniforms=(0.3,)),
    DrawSpec(4.0, keys=stream_keys(7, 0, 20, 7)),
    DrawSpec(4.0, uniforms=(0.1, 0.9)),
]


def one_by_one(kernels: Kernels, given: Case, specs: list[DrawSpec], vocab_size: int) -> list[list[int]]:
    found: list[list[int]] = []
    for first_row, length, token, spec in zip(*given.chains, specs, strict=True):
        ids: list[int] = []
        for step in range(length):
            own = spec._replace(uniforms=spec.uniforms[step : step + 1], keys=spec.keys[step : step + 1])
            [token] = kernels.choose(given.row(first_row + step, token)[:, :vocab_size].contiguous(), [own])
            ids.append(token)
        found.append(ids)
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_single_steps(kernels: Kernels, name: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    given = CASES[name]
    vocab_size = min(200, given.logits.shape[1]) if given.target_ids is None else 200
    for specs in (SPECS, SPECS[::-1], [DrawSpec()] * 4):
        specs = [
            spec._replace(uniforms=(*spec.uniforms, *[0.5] * 7)[:length] if spec.uniforms else ())
            for spec, length in zip(specs, LENS, strict=True)
        ]
        tokens, _, _ = kernels.choose_chains(given.logits, given.factors(kernels), given.chains, vocab_size, specs)
        assert tokens == one_by_one(kernels, given, specs, vocab_size)


def test_distributions_of_drawn_tokens_are_those_given_the_token_before(kernels: Kernels) -> None:
    given = CASES["full"]
    specs = [DrawSpec(4.0, uniforms=[0.5] * length) for length in LENS]
    tokens, probs, ids = kernels.choose_chains(given.logits, given.factors(kernels), given.chains, 200, specs)
    assert probs is not None
    assert ids is None
    laws = iter(probs)
    for first_row, token, chain in zip(given.chains.first_rows, BEFORE, tokens, strict=True):
        for step, previous in enumerate([token, *chain[:-1]]):
            expected = torch.softmax(given.row(first_row + step, previous).double() / 4.0, -1)[0]
            torch.testing.assert_close(next(laws).double(), expected, rtol=1e-5, atol=1e-7)


def test_chains_are_independent(kernels: Kernels) -> None:
    given = CASES["full"]
    specs = [DrawSpec(2.0, keys=stream_keys(chain, 0, 9, 7)) for chain in range(len(LENS))]
    factors = given.factors(kernels)
    together, _, _ = kernels.choose_chains(given.logits, factors, given.chains, 200, specs)
    for place in range(len(LENS)):
        alone = Chains(*(each[place : place + 1] for each in given.chains))
        assert kernels.choose_chains(given.logits, factors, alone, 200, [specs[place]])[0] == [together[place]]


def test_a_row_with_a_nan_ends_its_chain(kernels: Kernels) -> None:
    given = CASES["full"]
    logits = given.logits.clone()
    logits[given.chains.first_rows[2] + 3, 17] = torch.nan
    whole, _, _ = kernels.choose_chains(given.logits, given.factors(kernels), given.chains, 200, [DrawSpec()] * 4)
    cut, _, _ = kernels.choose_chains(logits, given.factors(kernels), given.chains, 200, [DrawSpec()] * 4)
    assert cut == [*whole[:2], whole[2][:3], whole[3]]


def test_inconsistent_arguments_are_refused(kernels: Kernels) -> None:
    given = CASES["full"]
    factors, specs = given.factors(kernels), [DrawSpec()] * 4

    def chosen(logits: Tensor = given.logits, chains: Chains = given.chains) -> None:
        kernels.choose_chains(logits, factors, chains, 200, specs)

    for wrong in (given.logits.bfloat16(), given.logits[:, :-1]):
        with pytest.raises(ValueError, match="does not fit"):
            chosen(logits=wrong)
    with pytest.raises(ValueError, match="beyond the"):
        chosen(logits=given.logits[:-1])
    with pytest.raises(ValueError, match="below 200"):
        chosen(chains=given.chains._replace(previous=(3, 0, 200, 5)))
    with pytest.raises(ValueError, match="float32"):
        replace(factors, first=given.first.double())
    for ids in (torch.arange(200) + 1, torch.arange(199)):
        with pytest.raises(ValueError, match="column"):
            replace(factors, target_ids=ids)
