"""Verification of a whole ragged batch. Only this module groups rows by their verification rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, Proposal, Verdict
from foredraft.engine.token_tree import ROOT, tokens_to
from foredraft.errors import ForedraftError
from foredraft.kernels import RULES as NATIVE_RULES
from foredraft.kernels import DrawSpec, Kernels, VerificationBatch
from foredraft.sampling import (
    NO_FAILURES,
    NOT_A_DISTRIBUTION,
    VERIFICATIONS,
    Choice,
    Failures,
    Pending,
    Row,
    Sampler,
    adjusted,
    pending_choice,
    select,
    to_device,
    token_probs_of,
)
from foredraft.sampling.search import kernels_for
from foredraft.verify.block import block_law
from foredraft.verify.case import case_of, of_row
from foredraft.verify.coupled import walk
from foredraft.verify.law import Case, OutcomeLaw, Rule, draw, next_weights, what_is_wrong
from foredraft.verify.rejection import rejection_law

RULES: Mapping[str, Rule] = MappingProxyType({"rejection": rejection_law, "block": block_law})
NO_RULES: Mapping[str, Rule] = MappingProxyType({})

__all__ = [
    "NO_RULES",
    "RULES",
    "Case",
    "OutcomeLaw",
    "Rule",
    "Verifier",
    "block_law",
    "checked_rules",
    "draw",
    "next_weights",
    "rejection_law",
    "verify",
    "walk",
]


def checked_rules(rules: Mapping[str, Rule]) -> Mapping[str, Rule]:
    """Check a user's rules, by name. Raises ForedraftError for a name that is taken, and for a rule that is not callable."""
    if not isinstance(rules, Mapping):
        raise ForedraftError(f"verification_rules must map names to rules, not be {type(rules).__name__}")
    for name, rule in rules.items():
        if not isinstance(name, str) or not name or name in VERIFICATIONS:
            raise ForedraftError(f"a verification rule needs a name of its own, not {name!r}")
        if not callable(rule):
            raise ForedraftError(
                f"the verification rule {name!r} must be a function of a Case, not {type(rule).__name__}"
            )
    return MappingProxyType(dict(rules))


class Verifier(Protocol):
    """The function that an engine calls for a verdict: `verify`, or a test's replacement."""

    def __call__(
        self,
        logits: Tensor,
        proposal: Proposal,
        samplers: Sequence[Sampler],
        histories: Sequence[Sequence[int]],
        *,
        near_tie: float = 0.0,
    ) -> Verdict:
        """See verify."""
        ...


def verify(
    logits: Tensor,
    proposal: Proposal,
    samplers: Sequence[Sampler],
    histories: Sequence[Sequence[int]],
    *,
    near_tie: float = 0.0,
    rules: Mapping[str, Rule] = NO_RULES,
) -> Verdict:
    """Decide which draft tokens are accepted, and which token follows them.

    logits: [sum(lens + 1), V], the target's rows, sequence after sequence: row 0 of sequence b follows its history, row i + 1 its
    draft token i and the tokens before that. near_tie: mark chosen tokens whose `log p + noise` exceeds the second best by less than
    this; 0: mark none. rules: custom rules by the name that requests use; they take precedence over RULES and the compiled ones. If a
    rule raises or returns an invalid distribution, only the requests that use it fail.
    """
    rows, starts = _rows(proposal, samplers, histories)
    size = len(samplers)
    by_ratio = [b for b in range(size) if _needs_ratio(proposal, samplers[b], b)]
    by_walk = sorted(set(range(size)) - set(by_ratio)) if by_ratio else list(range(size))
    parts = [_weigh(logits, rows, starts, proposal, group, rules) for group in _ratio_groups(samplers, by_ratio)]
    if by_walk:
        parts.append(_follow(logits, rows, starts, proposal, by_walk, near_tie))
    by_sequence = {b: outcome for part in Pending.joined(parts).resolve() for b, outcome in part.items()}
    outcomes = [by_sequence[b] for b in range(size)]
    return Verdict(
        paths=[outcome.path for outcome in outcomes],
        next_ids=[outcome.next_id for outcome in outcomes],
        near_ties=[outcome.near_ties for outcome in outcomes],
        failed=[outcome.failed for outcome in outcomes],
    )


class _Outcome(NamedTuple):
    """The outcome for one sequence; see Verdict."""

    path: Sequence[int]
    next_id: int
    near_ties: Sequence[bool] = ()
    failed: Failures = NO_FAILURES


_Outcomes: TypeAlias = dict[int, _Outcome]
"""Outcomes by the sequence's index in the batch."""


def _rows(
    proposal: Proposal, samplers: Sequence[Sampler], histories: Sequence[Sequence[int]]
) -> tuple[list[Row], list[int]]:
    """All rows of the batch, and the index of each sequence's first row (B + 1 numbers; the last is the number of rows)."""
    rows: list[Row] = []
    starts = [0]
    drafts = zip(proposal.draft_ids, proposal.draft_parents, strict=True)
    for sampler, history, (ids, parents) in zip(samplers, histories, drafts, strict=True):
        nodes, is_tree = range(ROOT, len(ids)), parents is not None
        rows += [Row(sampler, history, tokens_to(ids, parents, node), is_tree) for node in nodes]
        starts.append(len(rows))
    return rows, starts


def _needs_ratio(proposal: Proposal, sampler: Sampler, b: int) -> bool:
    """Whether a sequence's sampled draft must be weighed by p/q. Greedy rows, shared noise and certain drafts only compare ids."""
    if proposal.probs is None or not sampler.spec.draws:
        return False
    return any(row != CERTAIN for row in proposal.draft_prob_rows[b])


def _rows_of(batch: list[int], starts: list[int]) -> list[int]:
    return [r for b in batch for r in range(starts[b], starts[b + 1])]


def _first_rows(lens: Sequence[int]) -> list[int]:
    """The index of each sequence's first row for drafts of these lengths, followed by the number of rows."""
    return list(accumulate((length + 1 for length in lens), initial=0))


def _failed_rows(failed: Failures, start: int, end: int) -> Failures:
    """The failed rows of one sequence, by the number of draft tokens before them."""
    return {r - start: message for r, message in failed.items() if start <= r < end} if failed else NO_FAILURES


def _follow(
    logits: Tensor, rows: list[Row], starts: list[int], proposal: Proposal, batch: list[int], near_tie: float
) -> Pending[_Outcomes]:
    """Verify sequences whose draft tokens are compared with the target's own."""
    part = _rows_of(batch, starts)
    choice = pending_choice(select(logits, part), [rows[r] for r in part], margins=near_tie > 0)
    drafts = [(proposal.draft_ids[b], proposal.draft_parents[b]) for b in batch]
    return choice.then(lambda chosen: dict(zip(batch, _walked(chosen, drafts, near_tie), strict=True)))


def _walked(
    choice: Choice, drafts: Sequence[tuple[Sequence[int], Sequence[int] | None]], near_tie: float
) -> Iterator[_Outcome]:
    """The outcome of each draft. choice: for all rows of these drafts in order. drafts: (ids, parents)"""
    is_near_tie = [] if choice.margins is None else [margin < near_tie for margin in choice.margins]
    first_rows = pairwise(_first_rows([len(ids) for ids, _ in drafts]))
    for (draft_ids, parents), (start, end) in zip(drafts, first_rows, strict=True):
        path, next_id = walk(choice.ids[start:end], draft_ids, parents)
        rows = [start, *(start + 1 + node for node in path)]
        near_ties = [is_near_tie[row] for row in rows] if is_near_tie else ()
        failed = {i: choice.failed[row] for i, row in enumerate(rows) if row in choice.failed} if choice.failed else {}
        yield _Outcome(path, next_id, near_ties, failed)


def _ratio_groups(samplers: Sequence[Sampler], batch: list[int]) -> list[list[int]]:
    groups: dict[tuple[str, tuple[int, float, float] | None], list[int]] = {}
    for b in batch:
        groups.setdefault((samplers[b].params.verifier, samplers[b].spec.truncation), []).append(b)
    return list(groups.values())


def _weigh(
    logits: Tensor,
    rows: list[Row],
    starts: list[int],
    proposal: Proposal,
    batch: list[int],
    rules: Mapping[str, Rule],
) -> Pending[_Outcomes]:
    """Verify sequences of one rule and one truncation by weighing p against q. Unless logits are adjusted or the rule is a custom one,
    only truncation waits for the device, to find the ids it keeps."""
    part = _rows_of(batch, starts)
    part_rows = [rows[r] for r in part]
    selected, failed = adjusted(select(logits, part), part_rows)
    sampler = part_rows[0].sampler
    uniforms = sampler.uniforms(2 * len(batch))
    kernels = kernels_for(selected)
    name = sampler.params.verifier
    if name not in rules and kernels is not None and name in NATIVE_RULES:
        return Pending.of(_weigh_natively(kernels, selected, part_rows, failed, proposal, batch, uniforms))
    target = token_probs_of(selected, part_rows)
    # such a row ends its sequence if it is reached, but it must not spoil the rows before it
    is_bad = target.probs[:, 0].isnan()
    case, columns_to_ids = case_of(replace(target, probs=target.probs.nan_to_num()), proposal, batch)
    law, problem = _law_of(name, rules[name], case) if name in rules else (RULES[name](case), None)
    if problem is not None:
        failed = {**dict.fromkeys(range(len(part)), problem), **failed}
    stop, column = draw(case, law, to_device(uniforms, logits.device, torch.float64).reshape(-1, 2))
    next_ids = column if columns_to_ids is None else of_row(columns_to_ids, stop).gather(1, column[:, None])[:, 0]

    def finish(host: Sequence[Tensor]) -> _Outcomes:
        stops, ids, bad = (numbers.tolist() for numbers in host)
        return _weighed(
            batch, proposal, stops, ids, {**_bad_rows(r for r, is_bad in enumerate(bad) if is_bad), **failed}
        )

    return Pending([stop, next_ids, is_bad], finish)


def _bad_rows(rows: Iterable[int]) -> Failures:
    return dict.fromkeys(rows, NOT_A_DISTRIBUTION)


def _weighed(
    batch: list[int], proposal: Proposal, num_accepted: list[int], next_ids: list[int], failed: Failures
) -> _Outcomes:
    """Outcomes of weighed sequences. failed: by row of this batch."""
    first_rows = pairwise(_first_rows([len(proposal.draft_ids[b]) for b in batch]))
    return {
        b: _Outcome(range(stop), next_id, (), _failed_rows(failed, start, end))
        for b, stop, next_id, (start, end) in zip(batch, num_accepted, next_ids, first_rows, strict=True)
    }


def _law_of(name: str, rule: Rule, case: Case) -> tuple[OutcomeLaw, str | None]:
    """The outcome distribution of a user's rule, and None. If it is invalid: some valid distribution, and what is wrong."""
    try:
        law = rule(case)
        problem = what_is_wrong(law, case)
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}"
    if problem is None:
        return law, None
    return rejection_law(case), f"the verification rule {name!r} {problem}"


def _weigh_natively(
    kernels: Kernels,
    logits: Tensor,
    rows: list[Row],
    failed: Failures,
    proposal: Proposal,
    batch: list[int],
    uniforms: list[float],
) -> _Outcomes:
    """Verify with the compiled kernels, in one call: the same distributions and the same draw, for float32 and bfloat16 on the CPU."""
    assert proposal.probs is not None
    ids = [proposal.draft_ids[b] for b in batch]
    first_rows = _first_rows(list(map(len, ids)))[:-1]
    first_of_each = [rows[first] for first in first_rows]
    result = kernels.verify(
        logits,
        VerificationBatch(
            first_rows,
            ids,
            [proposal.draft_prob_rows[b] for b in batch],
            [DrawSpec(row.spec.temperature, row.spec.truncation) for row in first_of_each],
            [row.sampler.params.verifier for row in first_of_each],
            proposal.probs,
            proposal.kept_ids,
            uniforms,
        ),
    )
    failed = {**_bad_rows(result.bad_rows), **failed}
    return _weighed(batch, proposal, result.num_accepted, result.next_ids, failed)
