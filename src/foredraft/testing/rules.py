"""The contract of a verification rule: the text has the target's distribution, whatever was drafted. All drafts and all outcomes of
small cases are enumerated in float64, so for these cases this is a proof and not a statistical test.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN
from foredraft.sampling.token_probs import token_probs_under
from foredraft.testing.suite import name_of, run_suite
from foredraft.testing.toys import Prefix, Toy, random_laws, toy, toys
from foredraft.verify import Case, OutcomeLaw, Rule, next_weights
from foredraft.verify.case import case_of

EXACT = 1e-12
_DRAFTS: tuple[Prefix, ...] = ((0, 1, 2), (1,), (), (2, 2), (0,), (1, 0, 0))
_GARBAGE = (7.0, -1.0, math.inf, math.nan)
_TRUNCATIONS = ((2, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.3), (4, 0.8, 0.05))


def check_rule(rule: Rule) -> None:
    """Run RuleContract without pytest. Raises AssertionError with all broken clauses and how far off each is."""
    run_suite(_contract_of(rule), name_of(rule))


class RuleContract:
    """Subclass it and apply the rule in `rule`, and pytest tests it:

    class TestMine(RuleContract):
        def rule(self, case):
            return my_rule(case)
    """

    def rule(self, case: Case) -> OutcomeLaw:
        raise NotImplementedError("return the OutcomeLaw of this case")

    def test_the_stops_are_a_law(self) -> None:
        for name, case in self._cases():
            self._check_stops(name, case, self._law(case))

    def test_the_text_has_the_targets_law(self) -> None:
        for depth in (1, 2, 3):
            for name, case in toys(depth).items():
                for cut, rows in _cut_drafts(case):
                    _check_text(self._law, case, rows, f"toy {name!r} of {depth} draft tokens, {cut}")

    def test_the_text_has_the_targets_law_where_ids_are_truncated(self) -> None:
        for top_k, top_p, min_p in _TRUNCATIONS:
            case = toy(
                random_laws(11, 1.5, 5), random_laws(12, 1.5, 5), vocab_size=5, top_k=top_k, top_p=top_p, min_p=min_p
            )
            for cut, rows in _cut_drafts(case):
                _check_text(self._law, case, rows, f"top_k {top_k}, top_p {top_p}, min_p {min_p}, {cut}")

    def test_a_row_is_the_same_alone_and_in_any_batch(self) -> None:
        case = _ragged()
        together = outcome_table(self._law, case, _DRAFTS)
        for b, draft in enumerate(_DRAFTS):
            if draft:  # a batch with only a row without draft tokens never occurs
                error = _largest(together[b] - outcome_table(self._law, case, [draft])[0])
                assert error <= EXACT, (
                    f"the outcome of the draft {draft} changes by {error:.1e} depending on the batch that it is in"
                )

    def test_what_lies_beyond_a_draft_changes_nothing(self) -> None:
        expected = self._law(_padded(0.0))
        for garbage in _GARBAGE:
            case = _padded(garbage)
            law = self._law(case)
            error = max(
                _largest(law.stop - expected.stop), _largest(_tables(case, law) - _tables(_padded(0.0), expected))
            )
            assert error == 0, (
                f"the outcome changes by {error:.1e} if p and q contain {garbage} beyond a draft's length"
            )

    def test_a_rule_is_a_pure_function(self) -> None:
        for name, case in self._cases():
            before = [part.clone() for part in _parts(case)]
            first, second = self._law(case), self._law(case)
            same = all(torch.equal(a, b) for a, b in zip(before, _parts(case), strict=True))
            assert same, f"{name}: the rule modifies the case that it is given"
            again = torch.equal(first.stop, second.stop) and torch.equal(first.scale, second.scale)
            assert again, (
                f"{name}: the rule gives two different answers for one case; its randomness belongs in the draw"
            )

    def test_float32_is_near_float64(self) -> None:
        for name, case in self._cases():
            wide = self._law(case).stop
            narrow = self._law(_in_float32(case)).stop
            error = _largest(narrow.double() - wide)
            assert error <= 1e-3, f"{name}: in float32 the probability of a stop differs by {error:.1e}"

    def _law(self, case: Case) -> OutcomeLaw:
        law = self.rule(case)
        assert isinstance(law, OutcomeLaw), f"the rule must return an OutcomeLaw, not {type(law).__name__}"
        return law

    @staticmethod
    def _cases() -> Iterator[tuple[str, Case]]:
        yield "a ragged batch", _case_of(_ragged(), _DRAFTS)[0]
        for name, case in toys(2).items():
            yield f"toy {name!r}", _case_of(case, case.drafts())[0]

    @staticmethod
    def _check_stops(name: str, case: Case, law: OutcomeLaw) -> None:
        shape = tuple(case.p.shape[:2])
        for what, found in (("stop", law.stop), ("scale", law.scale)):
            assert tuple(found.shape) == shape, f"{name}: {what} must be [B, K + 1] = {shape}, not {tuple(found.shape)}"
            assert bool(found.isfinite().all()), f"{name}: {what} contains numbers that are not finite"
        beyond = torch.arange(shape[1])[None] > case.lens[:, None]
        assert not bool(law.stop[beyond].any()), f"{name}: stop is not 0 beyond the draft's length"
        assert float(law.stop.min()) >= -EXACT, f"{name}: a stop has probability {float(law.stop.min()):.3g}"
        error = _largest(law.stop.sum(1) - 1)
        assert error <= EXACT, f"{name}: the sum of the probabilities of a row's stops differs from 1 by {error:.1e}"


def _contract_of(rule: Rule) -> RuleContract:
    class Contract(RuleContract):
        def rule(self, case: Case) -> OutcomeLaw:
            return rule(case)

    return Contract()


def outcome_table(rule: Rule, case: Toy, drafts: Sequence[Prefix]) -> Tensor:
    """The distribution of each draft's outcome. -> [B, depth + 1, V], the probability of (number of accepted tokens, next id)"""
    laid_out, columns = _case_of(case, drafts)
    law = rule(laid_out)
    table = torch.zeros(len(drafts), case.depth + 1, case.vocab_size, dtype=torch.float64)
    found = _tables(laid_out, law)
    ids = torch.arange(case.vocab_size).expand(found.shape) if columns is None else columns
    table[:, : found.shape[1]].scatter_add_(2, ids, found)
    return table


def _tables(case: Case, law: OutcomeLaw) -> Tensor:
    """The probability of each pair of a stop and a next column. [B, K + 1, W]"""
    parts = []
    for j in range(case.p.shape[1]):
        weights = next_weights(case, law, torch.minimum(torch.full_like(case.lens, j), case.lens))
        next_law = weights / weights.sum(-1, keepdim=True)
        parts.append(torch.where(law.stop[:, j, None] > 0, law.stop[:, j, None] * next_law, 0))
    return torch.stack(parts, dim=1)


def _case_of(case: Toy, drafts: Sequence[Prefix]) -> tuple[Case, Tensor | None]:
    """The case as `verify` lays it out, on the ids that the target's truncation keeps."""
    params = case.params
    cut = (params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0))
    rows = case.target_rows(drafts)
    temperature = params.get("temperature", 1.0)
    laws = token_probs_under(rows, [temperature] * len(rows), None if cut == (0, 1.0, 0.0) else cut)
    return case_of(laws, case.proposal(drafts, (0, CERTAIN)), list(range(len(drafts))))


def _cut_drafts(case: Toy) -> Iterator[tuple[str, list[tuple[Prefix, Prefix]]]]:
    """Ways of proposing only part of a draft that all keep the text's distribution. -> a description, (the draft, its proposed part)"""
    drafts = case.drafts()

    def until(ends: Callable[[Prefix, int], bool], after: int) -> list[tuple[Prefix, Prefix]]:
        stops = [next((i + after for i in range(case.depth) if ends(x, i)), case.depth) for x in drafts]
        return [(x, x[:n]) for x, n in zip(drafts, stops, strict=True)]

    for length in range(1, case.depth + 1):
        yield f"of which {length} are proposed", [(x, x[:length]) for x in drafts]
    sure = until(lambda x, i: float(case.q[x[:i]].max()) < 0.6, 0)
    if any(part for _, part in sure):
        yield "drafted while the drafter is sure", sure
    yield "drafted until a token is unlikely", until(lambda x, i: float(case.q[x[:i]][x[i]]) < 0.5, 1)


def _check_text(rule: Rule, case: Toy, rows: Sequence[tuple[Prefix, Prefix]], where: str) -> None:
    table = outcome_table(rule, case, [part for _, part in rows])
    emitted: dict[Prefix, float] = defaultdict(float)
    for (draft, part), outcomes in zip(rows, table, strict=True):
        for stop, token in product(range(len(part) + 1), range(case.vocab_size)):
            emitted[(*part[:stop], token)] += case.odds(draft) * float(outcomes[stop, token])
    text, got = _worst(case, emitted)
    wanted = case.text_odds(text)
    assert abs(got - wanted) <= EXACT, (
        f"{where}: the text {' '.join(map(str, text))} has probability {got:.6g}, but the target generates it "
        f"with probability {wanted:.6g}"
    )


def _worst(case: Toy, emitted: Mapping[Prefix, float]) -> tuple[Prefix, float]:
    """The text whose probability is farthest from the target's, and that probability; NaN counts as farthest."""

    def odds(text: Prefix) -> float:
        return sum(emitted.get(text[:n], 0.0) * case.text_odds(text, n) for n in range(1, len(text) + 1))

    def distance(text: Prefix) -> float:
        found = abs(odds(text) - case.text_odds(text))
        return math.inf if math.isnan(found) else found

    worst = max(case.texts(), key=distance)
    return worst, odds(worst)


def _ragged() -> Toy:
    return toy(random_laws(1, 2), random_laws(2, 2), depth=3)


def _padded(garbage: float) -> Case:
    """Four chains of 0 to 3 draft tokens over 3 ids, with `garbage` beyond each."""
    generator = torch.Generator().manual_seed(3)

    def laws(*shape: int) -> Tensor:
        return torch.softmax(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)

    lens = torch.tensor([0, 1, 2, 3])
    beyond, beyond_p = torch.arange(3)[None] >= lens[:, None], torch.arange(4)[None] > lens[:, None]
    case = Case(laws(4, 4, 3), laws(4, 3, 3), laws(4, 3), laws(4, 3), lens)
    for part, mask in zip(_parts(case), (beyond_p, beyond, beyond, beyond), strict=False):
        part[mask] = garbage
    return case


def _in_float32(case: Case) -> Case:
    return Case(case.p.float(), case.q.float(), case.p_draft.float(), case.q_draft.float(), case.lens)


def _parts(case: Case) -> list[Tensor]:
    return [case.p, case.q, case.p_draft, case.q_draft, case.lens]


def _largest(x: Tensor) -> float:
    """The largest absolute value; infinite if there is a NaN."""
    largest = float(x.abs().max())
    return math.inf if math.isnan(largest) else largest
