"""Laws 1 and 2 under a constraint: with every drafter a constrained text has the distribution of the constrained target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import foredraft.drafters._constrained as held_module
from foredraft.drafters._constrained import held
from foredraft.engine.forced_prefix import ForcedPrefix
from foredraft.engine.proposal import Proposal
from foredraft.engine.sequence import TokenSequence
from foredraft.sampling import Row, TokenProbs, joined
from foredraft.verify import RULES
from tests.laws import (
    BROKEN,
    EXACT,
    Prefix,
    Toy,
    ToyConstraint,
    constrained,
    invisibility_violations,
    law_error,
    outcome_table,
    random_laws,
    sampler_for,
    some_ids,
    text_error,
    toy,
    walk_law_error,
)

RATIO_RULES = sorted(RULES)
Hold = Callable[[Row, list[int], TokenProbs | None], list[int]]


def case(seed: int = 0, **settings: object) -> Toy:
    return toy(random_laws(31 + seed, 1.5), random_laws(41 + seed, 1.5), depth=3, **settings)  # type: ignore[arg-type]


def form(seed: int) -> ToyConstraint:
    return ToyConstraint(some_ids(seed))


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("told", [False, True], ids=["drafter not told", "drafter told"])
def test_a_constrained_text_has_the_distribution_of_the_constrained_target(seed: int, rule: str, told: bool) -> None:
    assert law_error(constrained(case(seed), form(seed), told=told), rule) <= EXACT


@pytest.mark.parametrize("seed", range(6))
def test_with_certain_drafts_too_the_text_has_the_distribution_of_the_constrained_target(seed: int) -> None:
    assert walk_law_error(constrained(case(seed, certain=range(3)), form(seed))) <= EXACT


@pytest.mark.parametrize("seed", range(3))
def test_no_draft_changes_a_greedy_or_seeded_text(seed: int) -> None:
    held_to = constrained(case(seed), form(seed))
    assert invisibility_violations(held_to, seeds=[None], temperature=0.0) == 0
    assert invisibility_violations(held_to, seeds=range(5)) == 0
    assert invisibility_violations(held_to, seeds=range(5), top_k=2) == 0


# --- drafts that were written freely, then constrained --------------------------------------------------------------


def drafts_of(case: Toy, hold: Hold) -> Iterator[tuple[float, list[int], list[int], TokenProbs]]:
    """Enumerates what an unconstrained drafter may draw, and the drafts that `hold` may make of it. Yields the probability, the draft,
    the distribution that each token names, and the distributions. A second draw is enumerated by forcing each of its results."""
    sampler = sampler_for({}, **case.settings)
    row = Row(sampler, (0,))
    forced = ForcedPrefix.of(TokenSequence(0, [0], sampler, max_len=50, speculative_tokens=None), case.depth)
    assert not forced.ids, "a form whose first token is forced leaves nothing to draw"
    for written in product(range(case.vocab_size), repeat=case.depth):
        odds = case.odds(written)
        for result in range(case.vocab_size):
            weights: list[Tensor] = []

            def force(law: Tensor, _: Tensor, result: int = result, seen: list[Tensor] = weights) -> Tensor:
                seen.append(law[0] / law.sum())
                return torch.tensor([result])

            laws = TokenProbs(torch.stack([case.q[written[:i]] for i in range(case.depth)]).clone())
            with patch.object(held_module, "inverse_cdf", force):
                ids = hold(row, list(written), laws)
            share = float(weights[0][result]) if weights else 1.0
            if share > 0:
                yield odds * share, *forced.fit(ids, list(range(len(ids)))), laws
            if not weights:
                break


def held_error(case: Toy, rule: str, hold: Hold = held) -> float:
    """The largest error in the text's distribution if drafts are written freely and then constrained."""
    outcomes = list(drafts_of(case, hold))
    depth = case.depth
    rows = [[law if law < 0 else b * depth + law for law in laws] for b, (_, _, laws, _) in enumerate(outcomes)]
    proposal = Proposal.of([ids for _, ids, _, _ in outcomes], rows, joined([laws for *_, laws in outcomes]))
    with patch("tests.laws.Toy.is_ratio", lambda self, draft: False):
        emitted: dict[Prefix, float] = defaultdict(float)
        drawn = [b for b, (_, _, laws, _) in enumerate(outcomes) if any(law >= 0 for law in laws)]
        some = Proposal.of(
            [outcomes[b][1] for b in drawn], [rows[b] for b in drawn], joined([laws for *_, laws in outcomes])
        )
        table = outcome_table(case, [tuple(outcomes[b][1]) for b in drawn], rule, proposal=some)
    assert proposal.probs is not None
    for b, result in zip(drawn, table, strict=True):
        odds, ids, _, _ = outcomes[b]
        for num_accepted, token in result.nonzero().tolist():
            emitted[(*ids[:num_accepted], token)] += odds * float(result[num_accepted, token])
    for b in set(range(len(outcomes))) - set(drawn):
        odds, ids, _, _ = outcomes[b]
        for token, p in enumerate(case.p[tuple(ids)].tolist()):
            emitted[(*ids, token)] += odds * p
    return text_error(case, emitted)


FORMS = [seed for seed in range(12) if len(some_ids(seed)(())) > 1]


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("seed", FORMS)
def test_a_draft_that_is_constrained_afterwards_is_lossless(seed: int, rule: str) -> None:
    assert held_error(constrained(case(seed), form(seed)), rule) <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_without_an_allowed_token_is_lossless(rule: str) -> None:
    only_two = toy(random_laws(51, 1.5), lambda _: torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64), depth=2)
    assert held_error(constrained(only_two, ToyConstraint(lambda _: frozenset({0, 1}))), rule) <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_draft_that_is_cut_where_it_broke_the_constraint_is_lossless(rule: str) -> None:
    """Whether a draft is cut does not depend on which token would have followed."""

    def cut(row: Row, ids: list[int], laws: TokenProbs | None) -> list[int]:
        return held(row, ids, laws)[: row.sampler.num_allowed(row.history, ids)]

    for seed in FORMS:
        assert held_error(constrained(case(seed), form(seed)), rule, cut) <= EXACT


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_naming_the_unconstrained_distribution_is_detected(rule: str) -> None:
    def keeps_its_law(row: Row, ids: list[int], laws: TokenProbs | None) -> list[int]:
        assert laws is not None
        return held(row, ids, TokenProbs(laws.probs.clone()))

    assert max(held_error(constrained(case(seed), form(seed)), rule, keeps_its_law) for seed in FORMS) > BROKEN


class Blind(ToyConstraint):
    """A seeded bug: the mask ignores the draft tokens before it."""

    def allowed(self, history: Sequence[int], drafted: Sequence[int]) -> object:  # type: ignore[override]
        return super().allowed(history, ())


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_a_mask_that_does_not_see_the_draft_is_detected(rule: str) -> None:
    errors = []
    for seed in range(6):
        right = constrained(case(seed), form(seed), told=True)
        blind = Toy(
            **{
                **{f: getattr(right, f) for f in right.__dataclass_fields__},
                "settings": {"constraint": Blind(some_ids(seed))},
            }
        )
        errors.append(law_error(blind, rule))
    assert max(errors) > BROKEN
