"""Choosing and verifying on a device: the results are those of the CPU, and the code waits for the device only to read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal, Verdict
from foredraft.sampling import (
    Row,
    Sampler,
    checked_ids,
    choose,
    choose_with,
    draw_specs,
    pick,
    token_probs,
    token_probs_of,
)
from foredraft.verify import verify
from tests.far import Elsewhere, FarTensor, elsewhere
from tests.laws import sampler_for

VOCAB_SIZE = 40
LENS = [2, 0, 3, 1]
TOP = {"top_k": 9, "top_p": 0.9}
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 4,
    "block": [{"temperature": 0.8}, {"temperature": 1.3}, {"temperature": 0.8}, {"temperature": 1.0}],
    "rejection": [{"verification": "rejection"}] * 4,
    "seeded": [{"seed": 3}, {"seed": 4}, {"seed": 3, "temperature": 0.5}, {"seed": 5}],
    "truncated": [TOP] * 4,
    "seeded and truncated": [{**TOP, "seed": 3}] * 4,
    "mixed": [{"temperature": 0.0}, {}, {"seed": 3}, {}],
}
NUM_WAITS = {"truncated": 3, "seeded and truncated": 2}
"""Truncated token_probs take one more wait, for the number of ids that are kept; for rows by ratio and by comparison separately."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return elsewhere(monkeypatch)


def samplers_of(kind: str) -> list[Sampler]:
    own = [sampler_for(params, seed=5) for params in KINDS[kind]]
    for one in own:
        one.generator = own[0].generator
    return own


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    """In float64, for which the code path on the CPU is the same."""
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def proposal_of(samplers: list[Sampler], has_certain: bool = False) -> Proposal:
    """Drafts that are drawn as their requests require, from token_probs that differ from the target's."""
    ids: list[list[int]] = []
    prob_rows: list[list[int]] = []
    drawn = 0
    drafts = []
    for b, (own, length) in enumerate(zip(samplers, LENS, strict=True)):
        rows = [Row(own, (0,), (0,) * i) for i in range(length)]
        found = token_probs_of(random_logits(length, 100 + b), rows) if length else None
        ids.append(pick(found, rows)[0].tolist() if found else [])
        prob_rows.append([])
        for i in range(length):
            certain = not own.draws or (has_certain and i == 1)
            prob_rows[-1].append(CERTAIN if certain else drawn)
            if not certain and found is not None:
                drafts.append(found.dense(VOCAB_SIZE)[i])
                drawn += 1
    return Proposal.of(ids, prob_rows, token_probs.TokenProbs(torch.stack(drafts)) if drafts else None)


def verdict_of(logits: Tensor, kind: str, near_tie: float, has_certain: bool) -> Verdict:
    samplers = samplers_of(kind)
    proposal = proposal_of(samplers, has_certain)
    if isinstance(logits, FarTensor) and proposal.probs is not None:
        proposal = Proposal(proposal.ids, proposal.lens, proposal.prob_rows, FarTensor(proposal.probs))
    return verify(logits, proposal, samplers, [(0,)] * len(LENS), near_tie=near_tie)


@pytest.mark.parametrize("near_tie", [0.0, 0.3])
@pytest.mark.parametrize("has_certain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_verdict_is_that_of_the_cpu_and_waits_once_for_the_device(
    kind: str, has_certain: bool, near_tie: float, device: Elsewhere
) -> None:
    logits = random_logits(sum(LENS) + len(LENS))
    expected = verdict_of(logits, kind, near_tie, has_certain)
    with device:
        verdict = verdict_of(FarTensor(logits), kind, near_tie, has_certain)
    assert verdict == expected
    assert device.num_waits == NUM_WAITS.get(kind, 1)


@pytest.mark.parametrize("kind", ["greedy", "block", "seeded"])
def test_failed_rows_are_reported_in_the_verdict(kind: str, device: Elsewhere) -> None:
    logits = random_logits(sum(LENS) + len(LENS))
    logits[4] = torch.nan  # the first row of the third sequence
    expected = verdict_of(logits, kind, 0.0, has_certain=False)
    with device:
        verdict = verdict_of(FarTensor(logits), kind, 0.0, has_certain=False)
    assert verdict == expected
    assert [list(failed) for failed in verdict.failed] == [[], [], [0], []]
    assert device.num_waits == 1


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_chosen_as_on_the_cpu(kind: str, device: Elsewhere) -> None:
    logits = random_logits(4)
    chosen = choose(logits, [Row(own, (0,)) for own in samplers_of(kind)], margins=True)
    ways = draw_specs([Row(own, (0,)) for own in samplers_of(kind)])
    ids, found = choose_with(ways, 0, logits)
    with device:
        far = choose(FarTensor(logits), [Row(own, (0,)) for own in samplers_of(kind)], margins=True)
        far_ids, far_found = choose_with(ways, 0, FarTensor(logits))
        far_found = {row: law.cpu() for row, law in far_found.items()}
    assert chosen.margins is not None
    assert far == chosen
    assert far_ids == ids
    assert far_found.keys() == found.keys()
    assert all(torch.equal(far_found[row], law) for row, law in found.items())


def test_checking_ids_waits_once(device: Elsewhere) -> None:
    with device:
        ids, failed = checked_ids(FarTensor(torch.tensor([3, -1, 2, 0])))
    assert device.num_waits == 1
    assert ids == [3, 0, 2, 0]
    assert list(failed) == [1]
