"""Law 1: whatever is drafted, the text has the target's distribution. Tested exactly where it can be enumerated, else by Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal
from foredraft.sampling import Row, SamplingParams, choose, pick
from foredraft.sampling.noise import exponentials, stream_keys
from foredraft.sampling.token_probs import TokenProbs, inverse_cdf
from foredraft.verify import RULES, Case, draw, verify, walk
from foredraft.verify.law import OutcomeLaw
from tests.laws import (
    EXACT,
    FALSE_ALARM,
    Toy,
    chi_square,
    draw_law,
    expected_accepted,
    impossible_draws,
    independence,
    invisibility_violations,
    kept_noise_violations,
    law_error,
    one_hot,
    outcome_table,
    prefixes,
    random_laws,
    sampler_for,
    toy,
    toys,
    walk_law_error,
    walk_violations,
)

RATIO_RULES = sorted(RULES)
CASES = [(name, depth) for depth in (1, 2, 3) for name in toys(1)]


# --- rejection and block, enumerated ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize(("name", "depth"), CASES)
def test_the_text_has_the_targets_distribution(name: str, depth: int, rule: str) -> None:
    case = toys(depth)[name]
    if case.is_ratio((0,) * depth):
        assert law_error(case, rule) <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 4, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"temperature": 0.6, "top_k": 3},
        {"temperature": 1.7},
    ],
    ids=str,
)
def test_truncated_targets_keep_their_distribution(params: dict[str, float], rule: str) -> None:
    """Compared with the dense reference, with draft tokens that the target's truncation keeps or drops. Each outcome is also compared
    with that of the same rule for the truncated distribution in dense form."""
    p, q = random_laws(11, 1.5, 5), random_laws(12, 1.5, 5)
    for certain in ((), (1,)):
        case = toy(p, q, vocab_size=5, depth=2, certain=certain, **params)
        assert law_error(case, rule) <= EXACT
        dense = toy(lambda x, case=case: case.p[x], q, vocab_size=5, depth=2, certain=certain)
        drafts = case.drafts()
        error = (outcome_table(case, drafts, rule) - outcome_table(dense, drafts, rule)).abs().max()
        assert error <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_drafts_may_end_depending_on_the_drafters_confidence(rule: str) -> None:
    """A draft may stop *before* a token because of the tokens before it, or *after* a token whose q is low: both are lossless."""
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=3)

    def stop_before(draft: tuple[int, ...]) -> int:
        return next((i for i in range(3) if float(case.q[draft[:i]].max()) < 0.6), 3)

    def stop_after(draft: tuple[int, ...]) -> int:
        return next((i + 1 for i in range(3) if float(case.q[draft[:i]][draft[i]]) < 0.5), 3)

    for cut in (stop_before, stop_after):
        assert len({cut(x) for x in case.drafts()}) > 1
        assert law_error(case, rule, [cut]) <= EXACT


def test_block_accepts_at_least_as_much_as_rejection() -> None:
    gains = []
    for name, case in [*toys(2).items(), ("random, depth 3", toys(3)["random"])]:
        gains.append(expected_accepted(case, "block") - expected_accepted(case, "rejection"))
        assert gains[-1] >= -EXACT, name
    assert max(gains) > 0.01


def test_expected_acceptance_in_the_papers_example() -> None:
    """arXiv:2403.10444, section 3: p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens."""
    p, q = torch.tensor([1, 2], dtype=torch.float64) / 3, torch.tensor([2, 1], dtype=torch.float64) / 3
    case = toy(lambda _: p, lambda _: q, vocab_size=2, depth=2)
    assert expected_accepted(case, "rejection") == pytest.approx(10 / 9, abs=EXACT)
    assert expected_accepted(case, "block") == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_acceptance_rate_of_one_token_is_the_overlap_of_p_and_q(rule: str) -> None:
    """No rule can accept more than 1 - TV(p, q), and each of ours reaches it."""
    for name, case in toys(1).items():
        if case.is_ratio((0,)):
            overlap = float(torch.minimum(case.p[()], case.q[()]).sum())
            assert expected_accepted(case, rule) == pytest.approx(overlap, abs=EXACT), name


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_after_a_rejected_certain_token_the_distribution_is_the_targets_without_it(rule: str) -> None:
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=2, certain=[0])
    for draft in case.drafts():
        after_rejection = outcome_table(case, [draft], rule)[0, 0]
        expected = case.p[()].clone()
        expected[draft[0]] = 0
        if not after_rejection.any():  # block: the tokens after it may always save it
            continue
        torch.testing.assert_close(
            after_rejection / after_rejection.sum(), expected / expected.sum(), rtol=0, atol=EXACT
        )


# --- a row depends only on itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("params", [{}, {"top_k": 2}], ids=str)
def test_a_rows_outcomes_are_the_same_alone_and_in_any_batch(params: dict[str, float], rule: str) -> None:
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=3, **params)
    drafts = [(0, 1, 2), (1,), (), (2, 2), (0,), (1, 0, 0)]
    together = outcome_table(case, drafts, rule)
    for b, draft in enumerate(drafts):
        torch.testing.assert_close(together[b], outcome_table(case, [draft], rule)[0], rtol=0, atol=EXACT)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_garbage_in_the_padding_of_a_case_changes_nothing(rule: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def laws(*shape: int) -> Tensor:
        return torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)

    lens = torch.tensor([0, 1, 2, 3])
    p, q, p_draft, q_draft = laws(4, 4, 3), laws(4, 3, 3), laws(4, 3), laws(4, 3)
    beyond = torch.arange(3)[None] >= lens[:, None]
    beyond_p = torch.arange(4)[None] > lens[:, None]
    expected: tuple[Tensor, Tensor] | None = None
    for garbage in (0.0, 7.0, -1.0, math.inf, math.nan):
        parts = [p.clone(), q.clone(), p_draft.clone(), q_draft.clone()]
        for part, mask in zip(parts, (beyond_p, beyond, beyond, beyond), strict=True):
            part[mask] = garbage
        case = Case(*parts, lens)
        law = RULES[rule](case)
        got = (law.stop, draw_law(draw, case, law))
        expected = expected or got
        assert torch.equal(got[0], expected[0]), garbage
        assert torch.equal(got[1], expected[1]), garbage
    assert expected is not None
    assert not expected[0][beyond_p].any()
    torch.testing.assert_close(expected[0].sum(1), torch.ones(4, dtype=torch.float64), rtol=0, atol=EXACT)


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("padding", [(2, 1), (-1, CERTAIN), (10**9, 10**9)], ids=str)
@pytest.mark.parametrize("params", [{}, {"top_k": 2}], ids=str)
def test_garbage_in_the_padding_of_a_proposal_changes_nothing(
    params: dict[str, float], padding: tuple[int, int], rule: str
) -> None:
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=3, **params)
    drafts = [(0, 1, 2), (1,), (), (2, 2)]
    expected = outcome_table(case, drafts, rule)
    assert torch.equal(outcome_table(case, drafts, rule, padding=padding), expected)


@pytest.mark.parametrize("padding", [(2, 1), (-1, CERTAIN), (10**9, 10**9)], ids=str)
def test_garbage_in_the_padding_of_rows_that_compare_ids_changes_nothing(padding: tuple[int, int]) -> None:
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=3)
    drafts = [(0, 1, 2), (1,), (), (2, 2)]

    def run(proposal: Proposal) -> tuple[list[int], list[int]]:
        samplers = [sampler_for({"temperature": 0.0}), *(sampler_for({"seed": i}) for i in range(3))]
        verdict = verify(case.target_rows(drafts), proposal, samplers, [(0,)] * 4)
        return verdict.num_accepted, verdict.next_ids

    assert run(case.proposal(drafts, padding)) == run(case.proposal(drafts))


@pytest.mark.parametrize(
    "params", [{"verification": "rejection"}, {"verification": "block"}, {"seed": 1}, {"temperature": 0.0}], ids=str
)
def test_nan_after_an_impossible_token_does_not_change_the_outcome(params: dict[str, Any]) -> None:
    """Plain decoding would never have used that row (see Sampler.fail)."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [torch.nan] * 3, [0.0, 0.0, 0.0]])
    probs = torch.tensor([[0.0, 0.0, 1.0], [0.25, 0.5, 0.25]])
    proposal = Proposal(torch.tensor([[2, 1]]), torch.tensor([2]), torch.tensor([[0, 1]]), probs)
    verdict = verify(logits, proposal, [sampler_for(params)], [(0,)])
    assert verdict.num_accepted == [0]
    assert verdict.next_ids[0] in (0, 1)


def test_a_batch_without_any_draft_is_plain_decoding() -> None:
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=1)
    samplers = [sampler_for({"temperature": 0.0}), sampler_for({"seed": 5}), sampler_for({"top_k": 2}, seed=1)]
    proposal = Proposal.certain([()] * 3)
    verdict = verify(case.target_rows([()] * 3), proposal, samplers, [(0,)] * 3)
    twins = [sampler_for({"temperature": 0.0}), sampler_for({"seed": 5}), sampler_for({"top_k": 2}, seed=1)]
    expected = choose(case.target_rows([()] * 3), [Row(s, (0,)) for s in twins])
    assert verdict.num_accepted == [0, 0, 0]
    assert verdict.next_ids == expected.ids


# --- the draw -----------------------------------------------------------------------------------------------------


def test_the_inverse_cdf_has_exactly_the_given_distribution() -> None:
    """With weights in 64ths and every 64th as a uniform number, each column is drawn as often as its weight says, also if the weights do
    not sum to 1."""
    for weights in ([64], [1, 63], [0, 5, 0, 59, 0], [16, 16, 16, 16], [0, 0, 64], [32, 0, 32], [7, 0, 0, 20, 37, 0]):
        law = torch.tensor([weights], dtype=torch.float64)
        uniforms = torch.arange(64, dtype=torch.float64) / 64
        for scale in (1.0, 1 / 64, 3e-300, 1e300):
            columns = inverse_cdf((law * scale).expand(64, -1), uniforms)
            assert torch.bincount(columns, minlength=len(weights)).tolist() == weights


def test_the_inverse_cdf_never_gives_a_column_of_weight_zero() -> None:
    assert impossible_draws(inverse_cdf) == 0


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_the_draw_has_the_right_distribution_on_a_grid_of_uniforms(rule: str) -> None:
    """Without assumptions about how it draws: on a grid of n * n uniform numbers every outcome's share is its probability, up to the
    resolution of the grid at two interval edges."""
    case = toy(random_laws(1, 2), random_laws(2, 2), depth=2)
    p = torch.stack([case.p[()], case.p[(0,)], case.p[(0, 1)]])[None]
    q = torch.stack([case.q[()], case.q[(0,)]])[None]
    ids = torch.tensor([[0, 1]])
    c = Case(p, q, p[:, :2].gather(2, ids[..., None])[..., 0], q.gather(2, ids[..., None])[..., 0], torch.tensor([2]))
    law = RULES[rule](c)
    n = 200
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    uniforms = torch.stack(torch.meshgrid(grid, grid, indexing="ij"), dim=-1).reshape(-1, 2)
    many = Case(*(t.expand(n * n, *t.shape[1:]) for t in (c.p, c.q, c.p_draft, c.q_draft, c.lens)))
    stop, column = draw(many, OutcomeLaw(law.stop.expand(n * n, -1), law.scale.expand(n * n, -1)), uniforms)
    share = torch.bincount(stop * 3 + column, minlength=9).reshape(3, 3) / (n * n)
    torch.testing.assert_close(share.double(), draw_law(draw, c, law)[0], rtol=0, atol=2.5 / n)


# --- following the target's own tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_the_output_is_always_the_targets_text(depth: int) -> None:
    assert walk_violations(walk, 3, depth) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_certain_drafts_of_an_unseeded_request_keep_the_distribution(depth: int) -> None:
    for seed, sharpness in product(range(4), (0.5, 3, 20)):
        case = toy(random_laws(seed, sharpness), random_laws(seed + 50, 2), depth=depth, certain=range(depth))
        assert walk_law_error(case) <= EXACT


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 2}, {"top_p": 0.6, "temperature": 1.5}, {"temperature": 0.0}, {"repetition_penalty": 1.8}],
    ids=str,
)
def test_no_draft_changes_a_greedy_or_a_seeded_text(params: dict[str, float]) -> None:
    seeds: list[int | None] = [None] if params.get("temperature") == 0 else list(range(5))
    for name, case in toys(2).items():
        assert invisibility_violations(case, seeds=seeds, **params) == 0, name


def test_seeded_texts_have_the_targets_distribution_over_many_seeds() -> None:
    """One text for each of 5,000 seeds, in as many steps as its arbitrary drafts make it take; chi-square over all texts of three
    tokens."""
    case = toy(random_laws(1, 1.5), random_laws(2, 1.5), depth=2)
    num = 5000
    samplers = [sampler_for({"seed": i}) for i in range(num)]
    texts: list[tuple[int, ...]] = [()] * num
    while open_texts := [i for i in range(num) if len(texts[i]) < 3]:
        drafts = [(i % 3, i % 2)[: 2 - len(texts[i])] for i in open_texts]
        rows = torch.stack(
            [case.logits[texts[i] + x[:n]] for i, x in zip(open_texts, drafts, strict=True) for n in range(len(x) + 1)]
        )
        histories = [(0, *texts[i]) for i in open_texts]
        verdict = verify(rows, Proposal.certain(drafts), [samplers[i] for i in open_texts], histories)
        accepted, next_ids = verdict.num_accepted, verdict.next_ids
        for b, i in enumerate(open_texts):
            texts[i] = (*texts[i], *drafts[b][: accepted[b]], next_ids[b])
    counts = torch.zeros(3, 3, 3)
    for text in texts:
        counts[text] += 1
    expected = torch.tensor([case.text_odds(text) for text in case.texts()]) * num
    assert chi_square(counts, expected) > FALSE_ALARM


# --- the shared noise ---------------------------------------------------------------------------------------------


def stream_key(seed: int, child: int, position: int) -> int:
    return stream_keys(seed, child, position, 1)[0]


def noise(seed: int = 0, child: int = 0, position: int = 0, *, ids: int = 4) -> Tensor:
    return exponentials([stream_key(seed, child, position)], torch.arange(ids))[0]


AXES: dict[str, Callable[[int], dict[str, int]]] = {
    "seed": lambda i: {"seed": i},
    "child": lambda i: {"child": i},
    "position": lambda i: {"position": i},
}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", ["random", "p misses an id", "sharp"])
def test_draws_with_shared_noise_have_the_right_distribution(axis: str, name: str) -> None:
    """argmax(p / E) over many seeds, or over many children or positions of one seed."""
    p = toys(1)[name].p[()]
    keys = [stream_key(**{"seed": 7, "child": 0, "position": 3, **AXES[axis](i)}) for i in range(20_000)]
    drawn = (p / exponentials(keys, torch.arange(3))).argmax(-1)
    counts = torch.bincount(drawn, minlength=3)
    assert chi_square(counts, p * len(keys)) > FALSE_ALARM
    assert not counts[p == 0].any()


def test_the_noise_is_uniform() -> None:
    keys = [stream_key(seed, child, position) for seed in range(10) for child in range(4) for position in range(50)]
    uniform = torch.exp(-exponentials(keys, torch.arange(100))).flatten()
    assert uniform.min() > 0
    assert uniform.max() < 1
    cells = (uniform * 256).long().clamp(max=255)
    assert chi_square(torch.bincount(cells, minlength=256), torch.full((256,), len(uniform) / 256)) > FALSE_ALARM
    low_bits = (uniform * 2.0**30 % 1 * 64).long().clamp(max=63)
    assert chi_square(torch.bincount(low_bits, minlength=64), torch.full((64,), len(uniform) / 64)) > FALSE_ALARM


@pytest.mark.parametrize("axis", [*AXES, "id"])
@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbouring_noise_is_independent(axis: str, distance: int) -> None:
    """Between seeds, children, positions and token ids that are `distance` apart; chi-square on a grid of 8 * 8."""
    num = 30_000
    if axis == "id":
        flat = noise(seed=1, ids=num + distance)
    else:
        keys = [stream_key(**{"seed": 3, "child": 0, "position": 0, **AXES[axis](i)}) for i in range(num + distance)]
        flat = exponentials(keys, torch.tensor([17]))[:, 0]
    cells = (torch.exp(-flat) * 8).long().clamp(max=7)
    assert independence(cells[:-distance], cells[distance:], 8) > FALSE_ALARM


def test_noise_differs_for_every_seed_child_position_and_id() -> None:
    """Also where they have the same sum: (child 1, position 0) differs from (child 0, position 1), and so on for 4 * 4 * 4 * 4 cases."""
    keys = {stream_key(s, c, p) for s, c, p in product(range(8), repeat=3)}
    assert len(keys) == 8**3
    values = exponentials([stream_key(s, c, p) for s, c, p in product(range(4), repeat=3)], torch.arange(4))
    assert len(set(values.flatten().tolist())) == 4**4


def test_noise_is_exponential() -> None:
    values = noise(seed=5, ids=200_000)
    # mean and variance of Exp(1) are 1; the probability of five standard errors is less than FALSE_ALARM
    assert abs(float(values.mean()) - 1) < 5 / math.sqrt(200_000)
    assert abs(float(values.var()) - 1) < 5 * math.sqrt(8 / 200_000)


def test_noise_on_kept_ids_equals_the_noise_of_the_whole_vocabulary() -> None:
    keys = [stream_key(seed, 0, 5) for seed in range(6)]
    whole = exponentials(keys, torch.arange(5000))
    kept = torch.stack([torch.randperm(5000, generator=torch.Generator().manual_seed(i))[:40] for i in range(6)])
    assert torch.equal(exponentials(keys, kept), whole.gather(1, kept))
    assert kept_noise_violations(pick) == 0


def test_extreme_seeds_and_ids_give_finite_positive_noise() -> None:
    for seed in (0, -1, 2**63, 2**64 + 1, -(2**70)):
        values = exponentials([stream_key(seed, 0, 2**20)], torch.tensor([0, 151_935, 2**31]))
        assert bool(values.isfinite().all())
        assert bool((values > 0).all())


# --- end to end by Monte Carlo ------------------------------------------------------------------------------------


def monte_carlo(case: Toy, rule: str, num: int, seed: int) -> tuple[float, float]:
    """Draw drafts from q, verify all in one call, and continue each text with the target. -> (the p-value of a chi-square test against
    the target's distribution, the share of rows that ended in a recovered token)"""
    random = Random(seed)
    laws = [{x: row.tolist() for x, row in of.items()} for of in (case.p, case.q)]

    def draw_from(which: int, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return (*prefix, *random.choices(range(case.vocab_size), laws[which][prefix]))

    drafts: list[tuple[int, ...]] = []
    for i in range(num):
        draft: tuple[int, ...] = ()
        while len(draft) < (i % (case.depth + 1) if i % 3 == 0 else case.depth):
            draft = draw_from(1, draft)
        drafts.append(draft)
    samplers = [sampler_for({**case.params, "verification": rule}, seed=seed)] * num
    verdict = verify(case.target_rows(drafts), case.proposal(drafts), samplers, [(0,)] * num)
    counts = torch.zeros((case.vocab_size,) * (case.depth + 1))
    recovered = 0
    for draft, n, token in zip(drafts, verdict.num_accepted, verdict.next_ids, strict=True):
        recovered += n < len(draft)
        text = (*draft[:n], token)
        while len(text) <= case.depth:
            text = draw_from(0, text)
        counts[text] += 1
    expected = torch.tensor([case.text_odds(text) for text in case.texts()]) * num
    return chi_square(counts, expected), recovered / num


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize(
    ("certain", "params"),
    [((), {}), ((), {"top_p": 0.9, "temperature": 1.3}), ((1,), {"top_k": 2}), ((0, 1), {"temperature": 2.0})],
    ids=str,
)
def test_sampled_texts_have_the_targets_distribution(
    certain: tuple[int, ...], params: dict[str, Any], rule: str
) -> None:
    case = toy(random_laws(21, 1.5), random_laws(22, 1.5), depth=2, certain=certain, **params)
    odds, recovered = monte_carlo(case, rule, 3000, seed=4)
    assert recovered >= 0.2
    assert odds > FALSE_ALARM


def test_rows_of_every_kind_share_a_batch() -> None:
    """Greedy, seeded, block, rejection and truncated rows in one call: each has its own distribution."""
    case = toy(random_laws(21, 1.5), random_laws(22, 1.5), depth=2)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"verification": "block"},
        {"verification": "rejection"},
        {"top_k": 2, "verification": "rejection"},
        {"seed": 1},
    ]
    num = 1200
    generator = torch.Generator().manual_seed(0)
    drafts, samplers = [], []
    for i in range(num):
        a = int(torch.multinomial(case.q[()], 1, generator=generator))
        drafts += [(a, int(torch.multinomial(case.q[(a,)], 1, generator=generator)))[: 2 - (i % 5 == 0)]] * len(kinds)
        for kind in kinds:
            samplers.append(sampler_for({**kind, "seed": i} if "seed" in kind else kind))
            samplers[-1].generator = generator
    verdict = verify(case.target_rows(drafts), case.proposal(drafts), samplers, [(0,)] * len(drafts))
    for k, kind in enumerate(kinds):
        first = [drafts[b][0] if verdict.num_accepted[b] else verdict.next_ids[b] for b in range(k, len(drafts), 5)]
        law = case.p[()]
        if "temperature" in kind:
            law = one_hot(int(law.argmax()))
        if "top_k" in kind:
            law = torch.where(law >= law.sort().values[1], law, 0)
            law = law / law.sum()
        assert chi_square(torch.bincount(torch.tensor(first), minlength=3), law * num) > FALSE_ALARM, kind


def test_a_greedy_row_takes_the_argmax_whatever_the_draft_claims() -> None:
    for name, case in toys(2).items():
        rows = [x for x in prefixes(3, range(1, 3)) if len(x) == 2]
        samplers = [sampler_for({"temperature": 0.0}) for _ in rows]
        verdict = verify(case.target_rows(rows), case.proposal(rows), samplers, [(0,)] * len(rows))
        for draft, n, token in zip(rows, verdict.num_accepted, verdict.next_ids, strict=True):
            best = [int(case.logits[draft[:i]].argmax()) for i in range(3)]
            expected = next((i for i in range(2) if draft[i] != best[i]), 2)
            assert (n, token) == (expected, best[expected]), name


def test_near_ties_are_reported_by_position() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0 - 1e-6], [3.0, 0.0, 0.0], [2.0, 2.0 - 1e-6, 0.0]])
    samplers = [sampler_for({"temperature": 0.0})]
    for draft, expected in (((1, 0), 2), ((2, 0), 1), ((1, 2), 1)):
        verdict = verify(logits, Proposal.certain([draft]), samplers, [(0,)], near_tie=1e-4)
        num_emitted = verdict.num_accepted[0] + 1
        assert sum(verdict.near_ties[0][:num_emitted]) == expected, (draft, verdict)


def test_sampled_params_choose_their_rule() -> None:
    assert SamplingParams().verifier == "block"
    assert SamplingParams(seed=3).verifier == "coupled"
    assert SamplingParams(verification="rejection").verifier == "rejection"
    assert TokenProbs(torch.ones(1, 1)).dense(1).tolist() == [[1.0]]
