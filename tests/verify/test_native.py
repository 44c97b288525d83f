"""The compiled rules have the outcome laws of those in Python, which test_laws.py enumerates in float64."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch

from foredraft.kernels import RULES, DrawSpec, Kernels, VerificationBatch, VerificationResult, load_kernels, why_none
from tests.laws import Toy, outcome_table, random_laws, toy, toys

pytestmark = pytest.mark.skipif(load_kernels() is None, reason=f"no compiled kernels here: {why_none()}")

PARAMS: list[dict[str, Any]] = [
    {},
    {"top_k": 2},
    {"top_p": 0.7},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.6},
]
T = TypeVar("T")
GRID = 400
EXACT_FLOAT32 = 1e-6
"""The laws in Python are exact to 1e-12 in float64. The largest error measured here for the compiled ones, in float32, was 3.4e-7."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = load_kernels()
    assert loaded is not None
    return loaded


class Court:
    """Verifies every draft of a toy with given uniform numbers. kept: whether q is given as kept ids, in another order."""

    def __init__(self, kernels: Kernels, case: Toy, rule: str, dtype: torch.dtype, *, kept: bool) -> None:
        self.drafts = [x[:n] for x in case.drafts() for n in range(1, case.depth + 1) if case.is_ratio(x[:n])]
        self.lens = [len(x) for x in self.drafts]
        self._kernels, self._rule, self._params = kernels, rule, case.params
        self._proposal = case.proposal(self.drafts)
        self._logits = case.target_rows(self.drafts).to(dtype)
        assert self._proposal.probs is not None
        self._probs, self._ids = self._proposal.probs.float(), None
        if kept:
            self._probs, self._ids = self._probs.sort(dim=-1, descending=True)

    def verify(self, uniforms: torch.Tensor) -> VerificationResult:
        """uniforms: [B, n, 2] -> the result for B * n sequences"""
        times = uniforms.shape[1]
        starts = [sum(self.lens[:b]) + b for b in range(len(self.lens))]
        p = self._params
        spec = DrawSpec(p.get("temperature", 1.0), (p.get("top_k", 0), p.get("top_p", 1.0), p.get("min_p", 0.0)))

        def repeated(values: list[T]) -> list[T]:
            return [value for value in values for _ in range(times)]

        batch = VerificationBatch(
            repeated(starts),
            repeated(self._proposal.draft_ids),
            repeated(self._proposal.draft_prob_rows),
            [spec] * (times * len(self.lens)),
            [self._rule] * (times * len(self.lens)),
            self._probs,
            self._ids,
            uniforms.flatten().tolist(),
        )
        return self._kernels.verify(self._logits, batch)


def check(kernels: Kernels, case: Toy, rule: str, *, kept: bool) -> None:
    """Compare the number of accepted tokens, to EXACT_FLOAT32, and each next token's share on a grid of uniform numbers."""
    court = Court(kernels, case, rule, torch.float32, kept=kept)
    expected = outcome_table(case, court.drafts, rule)
    some = torch.full((len(court.drafts), 1, 2), 0.5, dtype=torch.float64)
    stops = torch.tensor(court.verify(some).stops.tolist(), dtype=torch.float64).view(len(court.drafts), -1)
    torch.testing.assert_close(stops, expected.sum(-1), rtol=0, atol=EXACT_FLOAT32)
    for stood in range(case.depth + 1):
        uniforms = torch.empty(len(court.drafts), GRID, 2, dtype=torch.float64)
        uniforms[..., 0] = (stops[:, : stood + 1].sum(1) - stops[:, stood] / 2).clamp(max=1)[:, None]
        uniforms[..., 1] = (torch.arange(GRID) + 0.5) / GRID
        found = court.verify(uniforms)
        accepted, next_ids = (torch.tensor(x).view(-1, GRID) for x in (found.num_accepted, found.next_ids))
        for b in (stops[:, stood] > 1e-4).nonzero()[:, 0].tolist():
            assert (accepted[b] == stood).all()
            share = torch.bincount(next_ids[b], minlength=case.vocab_size) / GRID
            law = expected[b, stood] / expected[b, stood].sum()
            torch.testing.assert_close(share.double(), law, rtol=0, atol=2.5 / GRID)


@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", toys(1))
def test_outcomes_have_the_law_of_the_rule_in_python(name: str, rule: str, kept: bool, kernels: Kernels) -> None:
    for depth in (1, 2, 3):
        case = toys(depth)[name]
        if case.is_ratio((0,) * depth):
            check(kernels, case, rule, kept=kept)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_truncated_targets_have_the_law_of_the_rule_in_python(
    params: dict[str, Any], rule: str, kept: bool, kernels: Kernels
) -> None:
    for certain in ((), (1,)):
        case = toy(random_laws(11, 1.5, 5), random_laws(12, 1.5, 5), vocab_size=5, certain=certain, **params)
        check(kernels, case, rule, kept=kept)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", [300, 70_001])
@pytest.mark.parametrize("params", PARAMS[:3], ids=str)
def test_wide_vocabularies_give_the_outcomes_of_the_rule_in_python(
    params: dict[str, Any], vocab_size: int, rule: str, kernels: Kernels
) -> None:
    """`verify` in float32, which is compiled, and in float64, which is not: the same outcomes of 40, except where a uniform number falls
    on an interval edge."""
    from foredraft.engine.proposal import Proposal
    from foredraft.sampling import Row, pick, token_probs_of
    from foredraft.verify import verify
    from tests.laws import sampler_for

    generator = torch.Generator().manual_seed(vocab_size)
    batch, depth = 40 if vocab_size < 1000 else 6, 3
    target = 3 * torch.randn(batch, depth + 1, vocab_size, generator=generator)
    draft = (target[:, :-1] + torch.randn(batch, depth, vocab_size, generator=generator)).flatten(0, 1)
    row = Row(sampler_for(params), (0,))
    laws = token_probs_of(draft, [row] * len(draft))
    ids, _ = pick(laws, [row] * len(draft))
    lens = torch.arange(batch) % 3 + 1
    proposal = Proposal(ids.view(batch, depth), lens, torch.arange(len(draft)).view(batch, depth), laws.probs, laws.ids)
    rows = torch.cat([logits[: n + 1] for logits, n in zip(target, lens.tolist(), strict=True)])
    outcomes = []
    for dtype in (torch.float32, torch.float64):
        samplers = [sampler_for({**params, "verification": rule}, seed=5)] * batch
        verdict = verify(rows.to(dtype), proposal, samplers, [(0,)] * batch)
        outcomes.append(list(zip(verdict.num_accepted, verdict.next_ids, strict=True)))
    assert sum(a != b for a, b in zip(*outcomes, strict=True)) <= 1
    assert len({accepted for accepted, _ in outcomes[0]}) > 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_sequences", [1, 2, 5])
@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("kept", [None, 700])
def test_outcomes_do_not_depend_on_the_number_of_threads(
    rule: str, num_sequences: int, top_k: int, kept: int | None, kernels: Kernels
) -> None:
    """With more threads than sequences, these share the columns of each row. kept: how many ids q has."""
    depth, vocab_size = 3, 30_001
    generator = torch.Generator().manual_seed(num_sequences)
    logits = 3 * torch.randn(num_sequences * (depth + 1), vocab_size, generator=generator)
    logits[2, 7] = torch.nan
    probs = (logits + torch.randn(logits.shape, generator=generator)).nan_to_num().softmax(-1)
    kept_ids = None
    if kept is not None:
        kept_ids = probs.topk(kept).indices
        probs = probs.gather(1, kept_ids)
        probs /= probs.sum(-1, keepdim=True)
    columns = torch.multinomial(probs, 1, generator=generator)
    drafted = columns if kept_ids is None else kept_ids.gather(1, columns)
    rows = torch.arange(len(logits)).view(num_sequences, depth + 1)[:, :depth]
    batch = VerificationBatch(
        list(range(0, len(logits), depth + 1)),
        drafted[rows, 0].tolist(),
        rows.tolist(),
        [DrawSpec(0.8, (top_k, 1.0, 0.0))] * num_sequences,
        [rule] * num_sequences,
        probs,
        kept_ids,
        torch.rand(2 * num_sequences, generator=generator).tolist(),
    )
    outcomes = []
    before = torch.get_num_threads()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outcomes.append(kernels.verify(logits, batch))
    torch.set_num_threads(before)
    assert outcomes[0].bad_rows == [2]
    assert outcomes[0] == outcomes[1] == outcomes[2]
